// A ring of messages in shared memory: one producer process, one consumer process. The side that
// runs dry spins for a moment, then sleeps on a futex; the other wakes it only if it sleeps.
//
// Neither side trusts the other's numbers. Each keeps its position privately, and the consumer
// copies a message before it looks at it, so that the message cannot change meanwhile.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <vector>

namespace shoal::transport {

// The other side is gone. `what()` says how this side noticed.
class PeerLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Lives in shared memory; zero-initialized.
struct RingControl {
  alignas(64) std::atomic<uint64_t> tail;  // bytes ever published by the producer
  alignas(64) std::atomic<uint64_t> head;  // bytes ever released by the consumer
  alignas(64) std::atomic<uint32_t> consumer_sleeps;
  alignas(64) std::atomic<uint32_t> producer_sleeps;
};
static_assert(sizeof(RingControl) == 256);

inline size_t ringRegionBytes(size_t capacity) {
  return sizeof(RingControl) + capacity;
}

// Called every 50 ms of a sleep. It may throw PeerLost; otherwise the wait goes on.
using Liveness = std::function<void()>;

class RingProducer {
 public:
  RingProducer(std::byte* region, size_t capacity, Liveness liveness);
  // Reserves contiguous room for a message of at most `bytes` (a multiple of 8). Waits for it.
  uint64_t* reserve(size_t bytes);
  // Publishes `bytes` of the reserved room.
  void commit(size_t bytes);
  // Whether a quarter of the ring is free, as far as this side has seen. Any thread may call this
  // and awaitRoom().
  bool hasRoom() const {
    // Not the shared tail: the consumer polls that line, so reading it here is a cache miss.
    const uint64_t tail = tail_.load(std::memory_order_relaxed);
    return tail - seen_head_.load(std::memory_order_relaxed) < capacity_ / 4 * 3;
  }
  // Waits at most `timeout_ms` while the ring is mostly full, until half of it is free. Returns
  // whether there is room.
  bool awaitRoom(int64_t timeout_ms);

 private:
  void waitForRoom(uint64_t needed_tail);

  RingControl* control_;
  std::byte* data_;
  size_t capacity_;
  std::atomic<uint64_t> tail_{0};       // written by the producing thread
  std::atomic<uint64_t> seen_head_{0};  // written by the producing thread and in awaitRoom()
  Liveness liveness_;
};

class RingConsumer {
 public:
  RingConsumer(std::byte* region, size_t capacity, size_t message_bytes_max, Liveness liveness);
  // Copies the next message into `message` (whole words) and returns true; false if there is none.
  // Throws std::length_error if the producer's numbers make no sense.
  bool poll(std::vector<uint64_t>& message);
  // Waits until a message may be there, at most `spin_us` awake, then asleep until `timeout_ms`.
  // Returns false on time-out.
  bool wait(int64_t spin_us, int64_t timeout_ms);
  // The two halves of wait(), for threads that wait for other things too. Both return true if a
  // message may be there. sleep() also returns when any thread calls nudge().
  bool spin(int64_t spin_us);
  bool sleep(int64_t timeout_ms);
  void nudge();
  // Copies a message that is not polled yet. `cursor` starts at position() and moves past the
  // message. Returns false if there is no valid one.
  uint64_t position() const { return head_; }
  bool peek(uint64_t& cursor, std::vector<uint64_t>& message) const;

 private:
  uint64_t headerAt(uint64_t position, uint64_t available) const;
  void copyOut(uint64_t position, uint64_t header, std::vector<uint64_t>& message) const;
  bool ready() const { return control_->tail.load(std::memory_order_acquire) != head_; }

  RingControl* control_;
  const std::byte* data_;
  size_t capacity_;
  size_t message_bytes_max_;
  uint64_t head_ = 0;
  // The shared tail as poll() saw it last. It looks again only when it has taken all up to here:
  // the producer writes that line with every message, and would lose it with every look.
  uint64_t seen_tail_ = 0;
  Liveness liveness_;
};

}  // namespace shoal::transport
