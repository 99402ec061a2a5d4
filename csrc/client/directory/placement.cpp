// Which member runs a call.
#include "client/directory/directory.h"

namespace shoal::client {

using wire::Address;

namespace {

// A byte without room costs as much as this many bytes that are fetched: it displaces another one,
// which has to come back.
constexpr uint64_t kShortageCost = 4;
constexpr int kNowhereShift = 16;  // a byte that does not even fit in swap space costs the most

}  // namespace

int Directory::place(std::span<const SegmentUse> uses, uint64_t made_bytes) {
  ++calls_;
  uint64_t largest = 0;
  uint32_t preferred = 0;
  int shared = -1;
  for (const SegmentUse& use : uses) {
    Segment& segment = segments_.at(use.base);
    segment.used_at = calls_;
    if (segment.shared) shared = segment.home;
    if (segment.home >= 0 && segment.bytes > largest) {
      largest = segment.bytes;
      preferred = static_cast<uint32_t>(segment.home);
    }
  }
  if (shared >= 0) return shared;
  int best = -1;
  uint64_t least = UINT64_MAX;
  for (size_t i = 0; i <= members_.size(); ++i) {  // the preferred one first: it wins a tie
    const uint32_t member = i == 0 ? preferred : static_cast<uint32_t>(i - 1);
    if (!members_[member].usable) continue;
    uint64_t missing = 0;
    uint64_t unbound = 0;
    for (const SegmentUse& use : uses) {
      const Segment& segment = at(use.base);
      if (segment.bound == 0) {
        unbound += segment.bytes;
      } else if ((segment.valid & bitOf(member)) == 0) {
        missing += segment.bytes;
      }
    }
    const uint64_t needed = missing + unbound + made_bytes;
    const uint64_t room = memory_.roomOf(member);
    uint64_t cost = missing + (needed > room ? (needed - room) * kShortageCost : 0);
    const uint64_t space = memory_.spaceOf(member);
    if (needed > space) cost += (needed - space) << kNowhereShift;
    const bool more_space = best >= 0 && space > memory_.spaceOf(static_cast<uint32_t>(best));
    if (cost < least || (cost == least && needed > room && more_space)) {
      least = cost;
      best = static_cast<int>(member);
    }
  }
  return best;
}

}  // namespace shoal::client
