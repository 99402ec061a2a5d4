// What happens in the order of a stream, though some of its bytes come, or leave, by other ways.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <utility>

#include "network/tls.h"

namespace shoal::network {

// One thread calls expect(), quiet(), then() and thenLatest(), which is the stream; any thread
// calls arrived().
class Order {
 public:
  // `held_bytes_max` bounds what waits; more makes the stream wait.
  explicit Order(size_t held_bytes_max) : held_bytes_max_(held_bytes_max) {}

  // From here on everything waits for arrived() with the ticket that this returns.
  uint64_t expect() {
    const std::lock_guard held(mutex_);
    entries_.push_back({Kind::kExpected, 0, nullptr});
    return first_ + entries_.size() - 1;
  }

  void arrived(uint64_t ticket) {
    {
      const std::lock_guard held(mutex_);
      entries_[ticket - first_].kind = Kind::kStep;
      while (!entries_.empty() && entries_.front().kind != Kind::kExpected) {
        if (entries_.front().step) entries_.front().step();
        held_bytes_ -= entries_.front().bytes;
        entries_.pop_front();
        ++first_;
      }
    }
    changed_.notify_all();
  }

  // Nothing is waited for: a step may be taken without then().
  bool quiet() const {
    const std::lock_guard held(mutex_);
    return entries_.empty();
  }

  // Takes `step` when all that is expected has arrived: now, or in the thread that brings the last
  // of it, before any later step. `bytes` is the memory that it holds until then, beside itself.
  void then(size_t bytes, std::function<void()> step) { add(Kind::kStep, bytes, std::move(step)); }

  // The same for steps of which the latest says all that those before it said: only that is kept.
  // So a slow piece does not make the stream, and with it the heartbeat, wait.
  void thenLatest(std::function<void()> step) { add(Kind::kLatest, 0, std::move(step)); }

  // Who waits in then() gives up.
  void stop() noexcept {
    {
      const std::lock_guard held(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
  }

 private:
  enum class Kind : uint8_t { kExpected, kStep, kLatest };
  struct Entry {
    Kind kind;
    size_t bytes;
    std::function<void()> step;
  };
  // A step that holds nothing is an entry still, with what it captures. If that did not count, who
  // lets us wait for a piece could make us hold small frames without end.
  static constexpr size_t kStepBytes = 2 * sizeof(Entry);

  void add(Kind kind, size_t bytes, std::function<void()> step) {
    std::unique_lock held(mutex_);
    if (kind == Kind::kLatest && !entries_.empty() && entries_.back().kind == kind) {
      entries_.back().step = std::move(step);
      return;
    }
    changed_.wait(held, [&] { return held_bytes_ <= held_bytes_max_ || stopped_; });
    if (stopped_) throw ConnectionLost("the session was closed");
    if (entries_.empty()) return step();
    held_bytes_ += bytes + kStepBytes;
    entries_.push_back({kind, bytes + kStepBytes, std::move(step)});
  }

  const size_t held_bytes_max_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> entries_;
  uint64_t first_ = 0;  // ticket of the first entry
  size_t held_bytes_ = 0;
  bool stopped_ = false;
};

}  // namespace shoal::network
