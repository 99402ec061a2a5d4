// The clock that all processes of one machine share, and a pause for loops that spin.
#pragma once

#include <time.h>

#include <cstdint>

namespace shoal {

inline int64_t nowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

// For a loop that waits for another core.
inline void cpuRelax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace shoal
