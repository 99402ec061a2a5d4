// Copies between devices that are put off until their target is used: an *owed* copy.
//
// Weights that one group has updated are needed by the others layer by layer. Were they all copied
// before the next step, every device would wait for all of them; owed, each comes just before its
// first use, in the stream of the device that uses it, and those after it come while the device
// computes.
//
// Whoever looks sees nothing of this. The target has no present bytes anywhere (`valid` is 0), so
// that the first use of it, whatever that is, brings them. The source's bytes are those of the time
// of the copy: before anything changes them, the copies that are owed of them are made. So a
// segment of which copies are owed always has its bytes.
#include <algorithm>

#include "client/replay/recording.h"
#include "client/space/session.h"

namespace shoal::client {

using wire::Address;

bool Session::copyLater(Address to_base, Address from_base) {
  if (to_base == 0 || from_base == 0 || to_base == from_base) return false;
  Stream::noteLine();
  const Lock held = lock();
  if (extents(to_base, held) != nullptr || extents(from_base, held) != nullptr) return false;
  Segment& to = at(to_base);
  Segment& from = at(from_base);
  // Of the whole lease's segments nobody knows where they will be; shared ones are not ours alone.
  if (to.pinned < 0 || from.pinned < 0 || to.pinned == from.pinned || to.shared || from.shared ||
      to.bytes != from.bytes || from.bound == 0) {
    return false;
  }
  Stream& target = *members_[static_cast<size_t>(to.pinned)];
  Stream& source = *members_[static_cast<size_t>(from.pinned)];
  if (to.bound != target.bit() || to.home != to.pinned || from.home != from.pinned) return false;
  target.checkUsable();
  source.checkUsable();
  bring(from_base, source, held);
  overwrite(to_base, held);
  to.valid = 0;
  to.owed_from = from_base;
  from.owes = true;
  debts_[wire::slotOf(from_base)].push_back(to_base);
  return true;
}

// Makes the copy that is owed to `base`.
void Session::collect(Address base, const Lock& held) {
  Segment& segment = at(base);
  const Address from_base = segment.owed_from;
  Stream& to = *members_[static_cast<size_t>(segment.home)];
  to.checkUsable();
  if (isGone(from_base)) members_[from_base - 1]->checkUsable();  // raises
  Stream& from = *members_[static_cast<size_t>(at(from_base).home)];
  from.checkUsable();
  const Recording::Aside aside;  // another device has its own copies to collect
  const uint64_t sequence = postFetch(to, base, from, from_base, 0, segment.bytes, held);
  forgive(base);
  wrote(base, to, sequence, held);
}

// The copy that is owed to `base` is not needed any more.
void Session::forgive(Address base) {
  Segment& segment = at(base);
  if (!isGone(segment.owed_from)) {
    const auto found = debts_.find(wire::slotOf(segment.owed_from));
    std::erase(found->second, base);
    if (found->second.empty()) {
      at(segment.owed_from).owes = false;
      debts_.erase(found);
    }
  }
  segment.owed_from = 0;
  segment.valid = members_[static_cast<size_t>(segment.home)]->bit();
}

// Makes all copies that are owed of `base`. What is lost with its device needs none.
void Session::settle(Address base, const Lock& held) {
  while (at(base).owes) {
    const Address target = debts_.at(wire::slotOf(base)).front();
    if (members_[static_cast<size_t>(at(target).home)]->usable()) {
      collect(target, held);
    } else {
      forgive(target);
    }
  }
}

void Session::overwrite(Address base, const Lock& held) {
  if (at(base).owes) settle(base, held);
  if (at(base).owed_from != 0) forgive(base);
}

// Before `base` is released.
void Session::endDebts(Address base, const Lock& held) noexcept {
  if (at(base).owed_from != 0) forgive(base);
  while (at(base).owes) {
    const Address target = debts_.at(wire::slotOf(base)).front();
    try {
      collect(target, held);
    } catch (...) {
      // One of the two devices is gone. If it is the source's, who uses the target is told.
      const auto home = static_cast<size_t>(at(base).home);
      forgive(target);
      if (members_[home]->usable()) continue;
      at(target).owed_from = home + 1;
      at(target).valid = 0;
    }
  }
}

}  // namespace shoal::client
