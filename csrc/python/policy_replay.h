// The worker's eviction policy on a recorded trace, for shoal.memory.replay.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "worker/paging/eviction_policy.h"

namespace shoal {

class PolicyReplay {
 public:
  PolicyReplay(uint64_t limit_bytes, bool least_recent) : policy_({limit_bytes, least_recent}) {
    policy_.setUpcoming(&upcoming_);
  }

  // Call `call`, which is ahead, uses or frees a segment. Calls do not fall.
  void foresee(uint64_t call, uint32_t segment, bool frees) {
    upcoming_.setEnd(call);
    upcoming_.add(segment, frees);
  }
  // Call `call` runs and uses these segments. All calls before `end` are foreseen.
  void advance(uint64_t call, uint64_t end, const std::vector<uint32_t>& used) {
    policy_.setNow(call);
    upcoming_.forget(call);
    upcoming_.setEnd(end);
    for (const uint32_t segment : used) policy_.use(at(segment));
  }
  void enter(uint32_t segment, uint64_t bytes) {
    at(segment).bytes = bytes;
    policy_.enter(at(segment));
  }
  // Afterwards swap space has its present bytes, or has not.
  void use(uint32_t segment, bool copied) { at(segment).copied = copied; }
  // Evicts a segment and returns its number; nothing if none can leave.
  std::optional<uint32_t> evict() {
    worker::PagedSegment* victim =
        policy_.victim(-1.0, [](const worker::PagedSegment&) { return true; });
    if (victim == nullptr) return std::nullopt;
    policy_.leave(*victim);
    return victim->slot;
  }
  bool isDead(uint32_t segment) { return policy_.isDead(at(segment)); }
  void free(uint32_t segment) {
    policy_.forget(at(segment));
    segments_.erase(segment);
  }

 private:
  worker::PagedSegment& at(uint32_t segment) {
    worker::PagedSegment& found = segments_[segment];
    found.slot = segment;
    return found;
  }

  worker::UpcomingUses upcoming_;
  worker::EvictionPolicy policy_;
  std::unordered_map<uint32_t, worker::PagedSegment> segments_;  // by number
};

}  // namespace shoal
