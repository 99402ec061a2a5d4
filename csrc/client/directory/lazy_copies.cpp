#include "client/directory/lazy_copies.h"

#include <algorithm>

namespace shoal::client {

using wire::Address;

bool LazyCopies::possible(Address to_base, Address from_base) const {
  if (to_base == 0 || from_base == 0 || to_base == from_base) return false;
  const Segment& to = segments_.at(to_base);
  const Segment& from = segments_.at(from_base);
  if (!to.live || !from.live) return false;  // sharded
  // Nobody knows where segments of the whole lease will be; shared ones change behind our back.
  return to.pinned >= 0 && from.pinned >= 0 && to.pinned != from.pinned && !to.shared &&
         !from.shared && to.bytes == from.bytes && from.bound != 0 && to.home == to.pinned &&
         from.home == from.pinned && to.bound == bitOf(static_cast<uint32_t>(to.pinned));
}

void LazyCopies::add(Address to_base, Address from_base) {
  Segment& to = segments_.at(to_base);
  to.valid = 0;
  to.copy_of = from_base;
  segments_.at(from_base).copied_later = true;
  pending_[wire::slotOf(from_base)].push_back(to_base);
}

void LazyCopies::cancel(Address target) {
  Segment& segment = segments_.at(target);
  if (segment.copy_of != 0) {
    const auto found = pending_.find(wire::slotOf(segment.copy_of));
    std::erase(found->second, target);
    if (found->second.empty()) {
      segments_.at(segment.copy_of).copied_later = false;
      pending_.erase(found);
    }
  }
  segment.copy_of = 0;
  segment.lost_source = -1;
  segment.valid = bitOf(static_cast<uint32_t>(segment.home));
}

Step LazyCopies::stepTo(Address target) {
  const Segment& segment = segments_.at(target);
  const auto lost = [](int8_t member) {
    return Step{Step::Kind::kRaise, Step::Reason::kLost, static_cast<uint8_t>(member)};
  };
  if (!usable(segment.home)) return lost(segment.home);
  if (segment.lost_source >= 0) return lost(segment.lost_source);
  Segment& source = segments_.at(segment.copy_of);
  promote(source, members_);
  const int8_t from = source.home;
  if (!usable(from)) return lost(from);
  return {Step::Kind::kFetch,
          Step::Reason::kNone,
          static_cast<uint8_t>(segment.home),
          static_cast<uint8_t>(from),
          target,
          segment.copy_of};
}

// A target on a lost device needs no copy.
Step LazyCopies::flushStep(Address source) {
  while (segments_.at(source).copied_later) {
    const Address target = pending_.at(wire::slotOf(source)).front();
    if (usable(segments_.at(target).home)) return stepTo(target);
    cancel(target);
  }
  return {};
}

Step LazyCopies::releaseStep(Address base) {
  if (segments_.at(base).awaitsCopy()) cancel(base);
  while (segments_.at(base).copied_later) {
    const Address target = pending_.at(wire::slotOf(base)).front();
    const Step step = stepTo(target);
    if (step.kind == Step::Kind::kFetch) return step;
    lose(target, usable(segments_.at(base).home));
  }
  return {};
}

void LazyCopies::lose(Address target, bool source_usable) {
  Segment& segment = segments_.at(target);
  const int8_t source = segments_.at(segment.copy_of).home;
  cancel(target);
  if (source_usable) return;  // then it is the target's device that is lost
  segment.lost_source = source;
  segment.valid = 0;
}

std::string LazyCopies::violation(Address base) const {
  const Segment& segment = segments_.at(base);
  const auto listed = pending_.find(wire::slotOf(base));
  if (segment.copied_later != (listed != pending_.end())) return "has a wrong flag of lazy copies";
  if (segment.copied_later) {
    for (const Address target : listed->second) {
      if (segments_.at(target).copy_of != base) return "lists a foreign copy";
      if (segments_.at(target).bytes != segment.bytes) return "has a lazy copy of another size";
    }
  }
  if (segment.copy_of != 0) {
    const auto found = pending_.find(wire::slotOf(segment.copy_of));
    if (found == pending_.end() || std::ranges::count(found->second, base) != 1) {
      return "waits for a lazy copy that its source does not list";
    }
  }
  return "";
}

}  // namespace shoal::client
