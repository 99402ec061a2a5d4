// Failures that a worker has reported. It reports each one once, with its next reply, to whichever
// thread gets that. Other threads that wait for messages around the failure learn of it here.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "wire/message.h"

namespace shoal::client {

struct ReportedFailure {
  wire::ErrorKind kind;
  std::vector<uint64_t> payload;  // a wire::ErrorReply
};

class ReportedFailures {
 public:
  // `shown_in` is the message in which the failure showed.
  void add(uint64_t shown_in, ReportedFailure failure) {
    const std::lock_guard held(mutex_);
    failures_.emplace(shown_in, std::move(failure));
    if (failures_.size() > kKeptMax) failures_.erase(failures_.begin());
    last_.store(failures_.rbegin()->first, std::memory_order_release);
  }
  // The first failure that showed in messages (after, until].
  std::optional<ReportedFailure> find(uint64_t after, uint64_t until) {
    if (last() <= after) return std::nullopt;
    const std::lock_guard held(mutex_);
    const auto first = failures_.upper_bound(after);
    if (first == failures_.end() || first->first > until) return std::nullopt;
    return first->second;
  }
  // The last message in which a reported failure showed; 0: none.
  uint64_t last() const { return last_.load(std::memory_order_acquire); }

 private:
  static constexpr size_t kKeptMax = 16;
  std::mutex mutex_;
  std::map<uint64_t, ReportedFailure> failures_;  // the latest, by message
  std::atomic<uint64_t> last_{0};
};

}  // namespace shoal::client
