#include "transport/progress.h"

#include <algorithm>

#include "base/clock.h"
#include "base/futex.h"
#include "transport/ring.h"

namespace shoal::transport {
namespace {

// The earliest sequence wins: its complement is the largest.
void announce(std::atomic<uint64_t>& awaited, uint64_t sequence) {
  uint64_t seen = awaited.load(std::memory_order_relaxed);
  while (seen < ~sequence &&
         !awaited.compare_exchange_weak(seen, ~sequence, std::memory_order_seq_cst)) {
  }
}

}  // namespace

void publish(Progress& progress, uint64_t sequence) {
  progress.done.store(sequence, std::memory_order_release);
  ringBell(progress);
}

void ringBell(Progress& progress) {
  // A sleeper announces itself and then looks at `done`; we publish that and then look for
  // sleepers. The fence makes one of the two see the other.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const uint64_t awaited = progress.awaited.load(std::memory_order_relaxed);
  if (awaited == 0 || progress.done.load(std::memory_order_relaxed) < ~awaited) return;
  ringForAll(progress);
}

void ringForAll(Progress& progress) {
  // A sleeper that announces itself from here on sees the new bell, or the bell wakes it.
  progress.awaited.store(0, std::memory_order_seq_cst);
  progress.bell.fetch_add(1, std::memory_order_seq_cst);
  futexWake(&progress.bell, INT_MAX);
}

void sleepUntilRung(Progress& progress, uint32_t bell, uint64_t sequence, int64_t timeout_ms) {
  ask(progress, sequence);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!isDone(progress, sequence)) futexWait(&progress.bell, bell, timeout_ms);
}

uint64_t issued(const Progress& progress) {
  const uint64_t done = progress.done.load(std::memory_order_acquire);
  return std::max(done, progress.issued.load(std::memory_order_acquire));
}

void ask(Progress& progress, uint64_t sequence) {
  announce(progress.awaited, sequence);
  if (progress.runs_late.load(std::memory_order_relaxed) == 0) return;
  progress.asked.fetch_add(1, std::memory_order_seq_cst);
  futexWake(&progress.asked, 1);
}

void giveUp(Progress& progress) {
  const uint64_t beat = progress.heartbeat.load(std::memory_order_relaxed);
  progress.given_up.store(beat + 1, std::memory_order_relaxed);
}

bool isGivenUp(const Progress& progress) {
  const uint64_t beat = progress.heartbeat.load(std::memory_order_relaxed);
  return progress.given_up.load(std::memory_order_relaxed) == beat + 1;
}

void note(Progress& progress, uint64_t event, Passed passed) {
  Moment& moment = progress.moments[event % kMoments];
  moment.event.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  moment.ns.store(passed.ns, std::memory_order_relaxed);
  moment.waited_ns.store(passed.waited_ns, std::memory_order_relaxed);
  moment.event.store(event, std::memory_order_release);
}

std::optional<Passed> passed(const Progress& progress, uint64_t event) {
  const Moment& moment = progress.moments[event % kMoments];
  if (moment.event.load(std::memory_order_acquire) != event) return std::nullopt;
  const Passed found{moment.ns.load(std::memory_order_relaxed),
                     moment.waited_ns.load(std::memory_order_relaxed)};
  std::atomic_thread_fence(std::memory_order_acquire);
  if (moment.event.load(std::memory_order_relaxed) != event) return std::nullopt;
  return found;
}

bool awaitDone(Progress& progress, uint64_t sequence, int64_t spin_us, int64_t timeout_ms) {
  if (isDone(progress, sequence)) return true;
  if (progress.runs_late.load(std::memory_order_relaxed) != 0) ask(progress, sequence);
  const int64_t start = nowNs();
  while (nowNs() - start < spin_us * 1000) {
    for (int i = 0; i < 32; ++i) {
      if (isDone(progress, sequence)) return true;
      cpuRelax();
    }
  }
  const int64_t deadline = start + timeout_ms * 1000000;
  for (int64_t now = start; now < deadline; now = nowNs()) {
    const uint32_t bell = progress.bell.load(std::memory_order_seq_cst);
    sleepUntilRung(progress, bell, sequence, (deadline - now) / 1000000 + 1);
    if (isDone(progress, sequence)) return true;
  }
  return isDone(progress, sequence);
}

}  // namespace shoal::transport
