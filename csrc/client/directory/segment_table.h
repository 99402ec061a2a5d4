// The segments of a session, by address.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "client/directory/segment.h"
#include "client/directory/slots.h"
#include "wire/address.h"

namespace shoal::client {

class SegmentTable {
 public:
  explicit SegmentTable(uint32_t session) : session_(session) { segments_.resize(kFirst); }

  const Segment& at(wire::Address base) const { return segments_[wire::slotOf(base)]; }
  Segment& at(wire::Address base) { return segments_[wire::slotOf(base)]; }
  wire::Address addressOf(uint32_t slot) const { return wire::makeAddress(session_, slot); }
  // Whether a live segment starts here.
  bool known(wire::Address base) const {
    return wire::slotOf(base) < slots_.end() && at(base).live;
  }
  // A new segment, which is not live yet. Returns 0 if no slot is left.
  wire::Address add(uint64_t bytes, int pinned) {
    const uint32_t end = slots_.end();
    const uint32_t slot = slots_.take(wire::slotsFor(bytes));
    if (slot == 0) return 0;
    if (slots_.end() != end) grow();
    Segment& segment = segments_[slot];
    segment = Segment();
    segment.bytes = bytes;
    segment.pinned = static_cast<int8_t>(pinned);
    return addressOf(slot);
  }
  // Its slots may be used again.
  void remove(wire::Address base) {
    const uint64_t count = wire::slotsFor(at(base).bytes);
    at(base) = Segment();
    slots_.give(wire::slotOf(base), count);
  }
  // Calls `see(address, segment)` for every live segment.
  template <typename See>
  void each(const See& see) const {
    for (uint32_t slot = 1; slot < slots_.end(); ++slot) {
      if (segments_[slot].live) see(addressOf(slot), segments_[slot]);
    }
  }

 private:
  static constexpr size_t kFirst = 1024;
  void grow() {
    if (segments_.size() >= slots_.end()) return;
    segments_.resize(std::max<size_t>(slots_.end(), segments_.size() * 2));
  }

  uint32_t session_;
  std::vector<Segment> segments_;  // by slot
  Slots slots_;
};

}  // namespace shoal::client
