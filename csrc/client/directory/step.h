// What the session must do next, and a log of what it did.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "wire/address.h"

namespace shoal::client {

// `kFetch` with `target` == `source` makes a replica; otherwise it makes a pending copy.
struct Step {
  enum class Kind : uint8_t { kNone, kAllocate, kFetch, kFree, kRaise };
  enum class Reason : uint8_t { kNone, kSharded, kShared, kLost };
  Kind kind = Kind::kNone;
  Reason reason = Reason::kNone;
  uint8_t to = 0;    // the member that gets or loses memory; for kRaise: the member concerned
  uint8_t from = 0;  // the member that has the bytes
  wire::Address target = 0;
  wire::Address source = 0;
  uint64_t host_block = 0;  // kFree: the host block that the copy was; 0: none
  explicit operator bool() const { return kind != Kind::kNone; }
};

// The latest steps, to explain a bug after the fact.
class StepLog {
 public:
  static constexpr size_t kKept = 256;

  void add(const Step& step) { steps_[added_++ % kKept] = step; }
  // Oldest first.
  std::vector<Step> latest() const {
    std::vector<Step> steps;
    for (uint64_t i = added_ - std::min<uint64_t>(added_, kKept); i < added_; ++i) {
      steps.push_back(steps_[i % kKept]);
    }
    return steps;
  }

 private:
  std::array<Step, kKept> steps_{};
  uint64_t added_ = 0;
};

}  // namespace shoal::client
