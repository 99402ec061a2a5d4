// Ranges for chunks on their way, in a ring: taken and released in order. Pure arithmetic; its user
// has the memory and the lock.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

namespace shoal::network {

class Staging {
 public:
  // Offsets are in [first, first + capacity).
  Staging(uint64_t first, uint64_t capacity) : first_(first), capacity_(capacity) {}

  // Takes a contiguous range of `bytes`, until release() of this or a larger ticket. Returns its
  // offset, or nothing if it does not fit now. Tickets do not fall.
  std::optional<uint64_t> take(uint64_t bytes, uint64_t ticket) {
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (bytes > capacity_) return std::nullopt;
    const uint64_t at = tail_ % capacity_;
    // A range does not wrap: it takes the rest of the ring with it.
    const uint64_t start = bytes <= capacity_ - at ? tail_ : tail_ + (capacity_ - at);
    if (start + bytes > head_ + capacity_) return std::nullopt;
    tail_ = start + bytes;
    held_.push_back({ticket, tail_});
    return first_ + start % capacity_;
  }
  void release(uint64_t ticket) {
    while (!held_.empty() && held_.front().ticket <= ticket) {
      head_ = held_.front().end;
      held_.pop_front();
    }
    if (held_.empty()) head_ = tail_ = 0;  // small programs stay in the same, warm memory
  }

 private:
  static constexpr uint64_t kAlignment = 64;
  struct Held {
    uint64_t ticket, end;
  };
  uint64_t first_, capacity_;
  uint64_t head_ = 0, tail_ = 0;  // bytes ever released, taken
  std::deque<Held> held_;
};

}  // namespace shoal::network
