// Keeps the order of a stream although some of its bytes arrive, or leave, on other connections.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <utility>

#include "network/tls/tls.h"

namespace shoal::network {

// One thread, the stream's, calls expect(), quiet(), then() and thenLatest(). Any thread calls
// arrived().
class Order {
 public:
  // If steps hold more than `held_bytes_max`, the stream waits.
  explicit Order(size_t held_bytes_max) : held_bytes_max_(held_bytes_max) {}

  // All later steps wait for arrived() with the ticket that this returns.
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

  // Whether no step waits: then the caller may take a step without then().
  bool quiet() const {
    const std::lock_guard held(mutex_);
    return entries_.empty();
  }

  // Runs `step` when all that is expected has arrived: now, or in the thread that calls arrived()
  // last, before any later step. Until then it holds `bytes` of memory beside itself.
  void then(size_t bytes, std::function<void()> step) { add(Kind::kStep, bytes, std::move(step)); }

  // The same for a step that replaces the one before it. So a slow chunk does not make the stream,
  // and with it the heartbeat, wait.
  void thenLatest(std::function<void()> step) { add(Kind::kLatest, 0, std::move(step)); }

  // A thread that waits in then() throws ConnectionLost.
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
  // A step without bytes still costs its entry. If that did not count, a peer that holds back one
  // chunk could make us keep small frames without end.
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
