// Lazy copies: copies between devices that are made when their target is used first.
//
// Weights that one group has updated are needed by the others layer by layer. If all of them were
// copied before the next step, every device would wait for all of them. A lazy copy is made just
// before its target's first use, in the stream of the device that uses it, and the next ones are
// made while that device computes.
//
// Callers cannot observe a lazy copy. Its target has no present bytes anywhere (`valid` is 0), so
// the first use of it makes the copy. The source keeps the bytes of the time of the copy: before
// anything changes them, the pending copies are made.
#include <algorithm>

#include "client/directory/directory.h"

namespace shoal::client {

using wire::Address;

bool Directory::canCopyLater(Address to_base, Address from_base) const {
  if (to_base == 0 || from_base == 0 || to_base == from_base) return false;
  if (extents(to_base) != nullptr || extents(from_base) != nullptr) return false;
  const Segment& to = at(to_base);
  const Segment& from = at(from_base);
  // Nobody knows where segments of the whole lease will be; shared ones change behind our back.
  return to.pinned >= 0 && from.pinned >= 0 && to.pinned != from.pinned && !to.shared &&
         !from.shared && to.bytes == from.bytes && from.bound != 0 && to.home == to.pinned &&
         from.home == from.pinned && to.bound == bit(static_cast<uint32_t>(to.pinned));
}

void Directory::copyLater(Address to_base, Address from_base) {
  Segment& to = segmentAt(to_base);
  to.valid = 0;
  to.copy_of = from_base;
  segmentAt(from_base).copied_later = true;
  pending_[wire::slotOf(from_base)].push_back(to_base);
}

Step Directory::copyStep(Address target) {
  const Segment& segment = at(target);
  const auto lost = [](int8_t member) {
    return Step{Step::Kind::kRaise, Step::Reason::kLost, static_cast<uint8_t>(member)};
  };
  if (!members_[static_cast<size_t>(segment.home)].usable) return lost(segment.home);
  if (segment.lost_source >= 0) return lost(segment.lost_source);
  const int8_t from = at(segment.copy_of).home;
  if (!members_[static_cast<size_t>(from)].usable) return lost(from);
  return {Step::Kind::kFetch,
          Step::Reason::kNone,
          static_cast<uint8_t>(segment.home),
          static_cast<uint8_t>(from),
          target,
          segment.copy_of};
}

void Directory::cancelCopy(Address base) {
  Segment& segment = segmentAt(base);
  if (segment.copy_of != 0) {
    const auto found = pending_.find(wire::slotOf(segment.copy_of));
    std::erase(found->second, base);
    if (found->second.empty()) {
      segmentAt(segment.copy_of).copied_later = false;
      pending_.erase(found);
    }
  }
  segment.copy_of = 0;
  segment.lost_source = -1;
  segment.valid = bit(static_cast<uint32_t>(segment.home));
}

// A target on a lost device needs no copy.
Step Directory::flushStep(Address base) {
  while (at(base).copied_later) {
    const Address target = pending_.at(wire::slotOf(base)).front();
    if (members_[static_cast<size_t>(at(target).home)].usable) return copyStep(target);
    cancelCopy(target);
  }
  return {};
}

Step Directory::flushForRelease(Address base) {
  if (at(base).awaitsCopy()) cancelCopy(base);
  while (at(base).copied_later) {
    const Address target = pending_.at(wire::slotOf(base)).front();
    const Step step = copyStep(target);
    if (step.kind == Step::Kind::kFetch) return step;
    loseCopy(target, members_[static_cast<size_t>(at(base).home)].usable);
  }
  return {};
}

void Directory::loseCopy(Address target, bool source_usable) {
  const int8_t source = at(at(target).copy_of).home;
  cancelCopy(target);
  if (source_usable) return;  // then it is the target's device that is lost
  segmentAt(target).lost_source = source;
  segmentAt(target).valid = 0;
}

}  // namespace shoal::client
