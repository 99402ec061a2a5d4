// Words in shared memory by which the worker says how far it got, so that others can ask without a
// round trip, and sleep until it is far enough.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace shoal::transport {

// When the worker passed an event, so that the time between two can be read without a message. An
// event's place is its number modulo kMoments; a later event takes it.
struct Moment {
  std::atomic<uint64_t> event;
  std::atomic<int64_t> ns;
  std::atomic<int64_t> waited_ns;  // for how long the device had waited for others up to then
};
inline constexpr size_t kMoments = 128;

// Zero-initialised.
struct Progress {
  // Sequence number of the last message that was done. Published after `failed`.
  alignas(64) std::atomic<uint64_t> completed;
  std::atomic<uint32_t> failed;                 // 1: a failure waits to be told with the next reply
  alignas(64) std::atomic<uint64_t> heartbeat;  // grows every kHeartbeatMs, even during a long call
  // The heartbeat at which the client gave the worker up, plus 1: other workers of the lease wait
  // for it no more, unless its heart has beaten since.
  std::atomic<uint64_t> given_up;
  // The complement of the earliest sequence that somebody sleeps for; 0: nobody sleeps.
  alignas(64) std::atomic<uint64_t> awaited;
  std::atomic<uint32_t> bell;  // grows when sleepers are to look again
  alignas(64) Moment moments[kMoments];
};

// Says that all messages up to `sequence` are done, and wakes who waits for that.
void publish(Progress& progress, uint64_t sequence);
// Wakes who waits for what is done by now; `publish` does this.
void ringBell(Progress& progress);
// Wakes all who wait, whatever for.
void ringForAll(Progress& progress);
// Sleeps until message `sequence` is done or somebody rings, at most `timeout_ms`. `bell` is what
// the bell was before the sleeper looked whether it has reason to sleep.
void sleepUntilRung(Progress& progress, uint32_t bell, uint64_t sequence, int64_t timeout_ms);

// Waits until message `sequence` is done, at most `timeout_ms`. Spins for `spin_us` before it
// sleeps. Returns whether it is done.
bool awaitCompleted(Progress& progress, uint64_t sequence, int64_t spin_us, int64_t timeout_ms);

// The client knows that the worker does not go on; and whether that is still so.
void giveUp(Progress& progress);
bool isGivenUp(const Progress& progress);

struct Passed {
  int64_t ns, waited_ns;
};
void note(Progress& progress, uint64_t event, Passed passed);
// When the event was passed; nothing if that is not known here.
std::optional<Passed> passed(const Progress& progress, uint64_t event);

inline constexpr int kHeartbeatMs = 200;
inline constexpr int kHeartbeatLostMs = 4000;  // silence after which the worker counts as lost

inline constexpr size_t kProgressBytes = 4096;
static_assert(sizeof(Progress) <= kProgressBytes);

}  // namespace shoal::transport
