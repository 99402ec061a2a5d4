// What all processes of a run share: counters, and how much of each device is in use.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>

namespace standin {

struct Counters {
  std::atomic<uint64_t> kernels;
  std::atomic<uint64_t> driver_calls;
  std::atomic<uint64_t> races;
  std::atomic<uint64_t> fail_call;  // the call with this number fails; 0: none does
};

Counters& counters();

// The bytes of a device that living processes hold, with their contexts.
uint64_t usedBytes(int device);
uint64_t usedBytesBy(int device, pid_t process);
// Whether the device had `bytes` left; if so, this process has them now.
bool take(int device, uint64_t bytes);
void giveBack(int device, uint64_t bytes);

}  // namespace standin
