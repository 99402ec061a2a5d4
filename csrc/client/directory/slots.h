// Which slots of a session's addresses are in use. A segment has one slot, or a run of several.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "wire/address.h"

namespace shoal::client {

class Slots {
 public:
  // The first of `count` slots in a row; 0 if they are not left. A run that was given back serves
  // runs of the same length again.
  uint32_t take(uint64_t count) {
    if (count == 1 && !free_.empty()) return latest(free_);
    return takeRunOrNew(count);
  }
  void give(uint32_t slot, uint64_t count) {
    (count == 1 ? free_ : free_runs_[count]).push_back(slot);
  }
  // No slot from here on was ever taken.
  uint32_t end() const { return end_; }

 private:
  static uint32_t latest(std::vector<uint32_t>& free) {
    const uint32_t slot = free.back();
    free.pop_back();
    return slot;
  }
  uint32_t takeRunOrNew(uint64_t count) {
    if (count > 1) {
      const auto run = free_runs_.find(count);
      if (run != free_runs_.end() && !run->second.empty()) return latest(run->second);
    }
    if (end_ + count > wire::kSlotsMax) return 0;
    const uint32_t slot = end_;
    end_ += static_cast<uint32_t>(count);
    return slot;
  }

  std::vector<uint32_t> free_;
  std::map<uint64_t, std::vector<uint32_t>> free_runs_;  // by the number of slots in a row
  uint32_t end_ = 1;
};

}  // namespace shoal::client
