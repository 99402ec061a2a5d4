// How far a worker is, in shared memory: others read it without a round trip, and sleep until it is
// far enough. A message is *issued* when its work was handed to the device, and *done* when the
// device has finished it. A CPU device does both at once. An accelerator is late; its worker waits
// for it where somebody asks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace shoal::transport {

// When the worker passed an event, so that the client reads the time between two without a message.
// The index of an event is its number modulo kMoments; a later event overwrites it.
struct Moment {
  std::atomic<uint64_t> event;
  std::atomic<int64_t> ns;
  std::atomic<int64_t> waited_ns;  // how long the device had waited for others until then
};
inline constexpr size_t kMoments = 128;

// Zero-initialized.
struct Progress {
  // Sequence number of the last message that is done. Published after `failed`. It only grows.
  alignas(64) std::atomic<uint64_t> done;
  std::atomic<uint32_t> failed;     // 1: the next reply reports a failure
  std::atomic<uint32_t> runs_late;  // 1: messages are done later than issued
  std::atomic<uint64_t> issued;     // the last message that was issued; only if `runs_late`
  alignas(64) std::atomic<uint64_t> heartbeat;  // grows every kHeartbeatMs, even during a long call
  // The heartbeat at which the client gave the worker up, plus 1. Other workers of the lease stop
  // waiting for it, unless its heartbeat has changed since.
  std::atomic<uint64_t> given_up;
  // The complement of the earliest sequence that a thread sleeps for; 0: none sleeps.
  alignas(64) std::atomic<uint64_t> awaited;
  std::atomic<uint32_t> bell;  // grows when sleepers must look again
  std::atomic<uint32_t>
      asked;  // grows when `done` should; the worker of a late device sleeps on it
  alignas(64) Moment moments[kMoments];
};

// Publishes that all messages up to `sequence` are done, and wakes the threads that wait for that.
void publish(Progress& progress, uint64_t sequence);
// Wakes the threads whose message is done; `publish` does this.
void ringBell(Progress& progress);
// Wakes all waiting threads.
void ringForAll(Progress& progress);
// Sleeps until message `sequence` is done or the bell rings, at most `timeout_ms`. `bell` is its
// value from before the caller checked that it has reason to sleep.
void sleepUntilRung(Progress& progress, uint32_t bell, uint64_t sequence, int64_t timeout_ms);

inline bool isDone(const Progress& progress, uint64_t sequence) {
  return progress.done.load(std::memory_order_acquire) >= sequence;
}
uint64_t issued(const Progress& progress);
// Makes the worker of a late device find out whether message `sequence` is done. Does not wait.
void ask(Progress& progress, uint64_t sequence);
// Waits until message `sequence` is done, at most `timeout_ms`. Spins for `spin_us` before it
// sleeps. Returns whether it is done.
bool awaitDone(Progress& progress, uint64_t sequence, int64_t spin_us, int64_t timeout_ms);

// The client gives the worker up; whether that still holds.
void giveUp(Progress& progress);
bool isGivenUp(const Progress& progress);

struct Passed {
  int64_t ns, waited_ns;
};
void note(Progress& progress, uint64_t event, Passed passed);
// When the worker passed the event; nothing if that is not known here.
std::optional<Passed> passed(const Progress& progress, uint64_t event);

inline constexpr int kHeartbeatMs = 200;
inline constexpr int kHeartbeatLostMs = 4000;  // silence after which the worker counts as lost

inline constexpr size_t kProgressBytes = 4096;
static_assert(sizeof(Progress) <= kProgressBytes);

}  // namespace shoal::transport
