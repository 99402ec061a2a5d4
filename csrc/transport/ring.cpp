#include "transport/ring.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/futex.h"
#include "wire/message.h"

namespace shoal::transport {
namespace {

constexpr int64_t kEagerNs = 30000;
constexpr int64_t kSliceMs = 50;  // how long one sleep lasts before liveness is checked again

bool isPad(uint64_t header) {
  return wire::headerKind(header) == static_cast<uint16_t>(wire::Kind::kPad);
}

}  // namespace

RingProducer::RingProducer(std::byte* region, size_t capacity, Liveness liveness)
    : control_(reinterpret_cast<RingControl*>(region)),
      data_(region + sizeof(RingControl)),
      capacity_(capacity),
      liveness_(std::move(liveness)) {}

uint64_t* RingProducer::reserve(size_t bytes) {
  const uint64_t tail = tail_.load(std::memory_order_relaxed);
  const size_t at = tail % capacity_;
  const size_t to_end = capacity_ - at;
  if (bytes <= to_end) {
    if (tail + bytes > seen_head_.load(std::memory_order_relaxed) + capacity_) {
      waitForRoom(tail + bytes);
    }
    return reinterpret_cast<uint64_t*>(data_ + at);
  }
  // Messages never wrap: the rest of the ring becomes padding.
  waitForRoom(tail + to_end + bytes);
  auto* pad = reinterpret_cast<uint64_t*>(data_ + at);
  *pad = wire::headerWord(wire::Kind::kPad, static_cast<uint32_t>(to_end), 0);
  tail_.store(tail + to_end, std::memory_order_relaxed);
  return reinterpret_cast<uint64_t*>(data_);
}

void RingProducer::commit(size_t bytes) {
  const uint64_t tail = tail_.load(std::memory_order_relaxed) + bytes;
  tail_.store(tail, std::memory_order_relaxed);
  control_->tail.store(tail, std::memory_order_release);
  // The consumer announces its sleep and then looks at the tail; we publish the tail and then look
  // for a sleeper. The fence makes one of the two see the other.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (control_->consumer_sleeps.load(std::memory_order_relaxed) != 0) {
    control_->consumer_sleeps.store(0, std::memory_order_relaxed);
    futexWake(&control_->tail);
  }
}

void RingProducer::waitForRoom(uint64_t needed_tail) {
  int64_t spin_until = 0;
  while (true) {
    const uint64_t seen = control_->head.load(std::memory_order_acquire);
    seen_head_.store(seen, std::memory_order_relaxed);
    if (needed_tail <= seen + capacity_) return;
    const int64_t now = nowNs();
    if (spin_until == 0) spin_until = now + 50000;
    if (now < spin_until) {
      cpuRelax();
      continue;
    }
    control_->producer_sleeps.store(1, std::memory_order_seq_cst);
    const uint64_t head = control_->head.load(std::memory_order_seq_cst);
    if (needed_tail > head + capacity_) {
      futexWait(&control_->head, static_cast<uint32_t>(head), kSliceMs);
    }
    control_->producer_sleeps.store(0, std::memory_order_relaxed);
    liveness_();
  }
}

bool RingProducer::awaitRoom(int64_t timeout_ms) {
  constexpr int64_t kPauseNsMax = 1000000;
  const int64_t end = nowNs() + timeout_ms * 1000000;
  seen_head_.store(control_->head.load(std::memory_order_acquire), std::memory_order_relaxed);
  if (hasRoom()) return true;
  for (timespec pause{0, 50000}; nowNs() < end;
       pause.tv_nsec = std::min(2 * pause.tv_nsec, kPauseNsMax)) {
    nanosleep(&pause, nullptr);
    const uint64_t head = control_->head.load(std::memory_order_acquire);
    seen_head_.store(head, std::memory_order_relaxed);
    if (control_->tail.load(std::memory_order_relaxed) - head <= capacity_ / 2) return true;
  }
  liveness_();
  return hasRoom();
}

RingConsumer::RingConsumer(std::byte* region, size_t capacity, size_t message_bytes_max,
                           Liveness liveness)
    : control_(reinterpret_cast<RingControl*>(region)),
      data_(region + sizeof(RingControl)),
      capacity_(capacity),
      message_bytes_max_(message_bytes_max),
      liveness_(std::move(liveness)) {}

// The header of the message at `position`; 0 if it is not valid. The producer claims that
// `available` bytes are there.
uint64_t RingConsumer::headerAt(uint64_t position, uint64_t available) const {
  if (available > capacity_ || available % 8 != 0) return 0;
  const size_t at = position % capacity_;
  uint64_t header;
  std::memcpy(&header, data_ + at, sizeof header);
  const size_t bytes = wire::headerBytes(header);
  const bool fits = bytes >= 8 && bytes % 8 == 0 && bytes <= available && bytes <= capacity_ - at;
  return fits && (isPad(header) || bytes <= message_bytes_max_) ? header : 0;
}

void RingConsumer::copyOut(uint64_t position, uint64_t header,
                           std::vector<uint64_t>& message) const {
  message.resize(wire::headerBytes(header) / 8);
  std::memcpy(message.data(), data_ + position % capacity_, wire::headerBytes(header));
  message[0] = header;  // the copy that was checked
}

bool RingConsumer::poll(std::vector<uint64_t>& message) {
  while (true) {
    if (seen_tail_ == head_) seen_tail_ = control_->tail.load(std::memory_order_acquire);
    if (seen_tail_ == head_) return false;
    const uint64_t header = headerAt(head_, seen_tail_ - head_);
    if (header == 0) throw std::length_error("the ring's tail or a message in it is out of range");
    if (!isPad(header)) copyOut(head_, header, message);
    head_ += wire::headerBytes(header);
    control_->head.store(head_, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (control_->producer_sleeps.load(std::memory_order_relaxed) != 0) {
      futexWake(&control_->head);
    }
    if (!isPad(header)) return true;
  }
}

bool RingConsumer::peek(uint64_t& cursor, std::vector<uint64_t>& message) const {
  while (true) {
    if (cursor < head_) cursor = head_;
    const uint64_t available = control_->tail.load(std::memory_order_acquire) - cursor;
    const uint64_t header = available == 0 ? 0 : headerAt(cursor, available);
    if (header == 0) return false;
    if (!isPad(header)) copyOut(cursor, header, message);
    cursor += wire::headerBytes(header);
    if (!isPad(header)) return true;
  }
}

bool RingConsumer::spin(int64_t spin_us) {
  const int64_t start = nowNs();
  for (int64_t waited = 0; waited < spin_us * 1000; waited = nowNs() - start) {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      cpuRelax();
    }
    // A wake-up would take less time by now: let other threads have the core between two looks.
    if (waited > kEagerNs) sched_yield();
  }
  return ready();
}

bool RingConsumer::sleep(int64_t timeout_ms) {
  control_->consumer_sleeps.store(1, std::memory_order_seq_cst);
  const uint64_t tail = control_->tail.load(std::memory_order_seq_cst);
  if (tail == head_) futexWait(&control_->tail, static_cast<uint32_t>(tail), timeout_ms);
  control_->consumer_sleeps.store(0, std::memory_order_relaxed);
  return ready();
}

void RingConsumer::nudge() {
  futexWake(&control_->tail);
}

bool RingConsumer::wait(int64_t spin_us, int64_t timeout_ms) {
  const int64_t start = nowNs();
  if (spin(spin_us)) return true;
  while (!ready()) {
    if (nowNs() - start > timeout_ms * 1000000) return false;
    if (!sleep(kSliceMs)) liveness_();
  }
  return true;
}

}  // namespace shoal::transport
