// How the stand-in behaves: read once from the environment, which the launcher sets.
#pragma once

#include <cstdint>
#include <string>

namespace standin {

enum class Mode { kNow, kLate, kThreads, kRandom };

struct Config {
  Mode mode = Mode::kLate;
  int devices = 1;
  uint64_t memory_bytes = 8ULL << 30;    // of each device
  uint64_t context_bytes = 32ULL << 20;  // that a process's context on a device costs
  uint64_t seed = 0;                     // of `random`
  int64_t patience_ns = 20000000;        // until queued work that the host may poll for runs
  // `threads`: declared speeds in bytes per second, and the cost of starting something.
  double copy_speed = 0;    // between host and device; 0: as fast as the host copies
  double peer_speed = 0;    // between devices
  double kernel_speed = 0;  // bytes that a kernel reads and writes
  int64_t delay_ns = 0;     // before each kernel and copy
  std::string state_path;   // shared by all processes of a run; empty: this process alone
};

const Config& config();

}  // namespace standin
