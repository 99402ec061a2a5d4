// Sleeping on a word in shared memory until another process has changed it.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace shoal::transport {

// Sleeps while the 32 bits at `word` still equal `expected`. May wake for no reason.
inline void futexWait(const void* word, uint32_t expected, int64_t timeout_ms) {
  const timespec limit{timeout_ms / 1000, (timeout_ms % 1000) * 1000000};
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &limit, nullptr, 0);
}

inline void futexWake(const void* word, int sleepers = 1) {
  syscall(SYS_futex, word, FUTEX_WAKE, sleepers, nullptr, nullptr, 0);
}

}  // namespace shoal::transport
