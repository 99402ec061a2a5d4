// Ctrl-C while the program waits for a device.
#pragma once

#include <cstdint>

namespace shoal::client {

// Marks exceptions that end a wait because a signal came. What was waited for goes on.
struct Interrupted {};

// One wait of this thread, which holds no lock other threads may wait for: look() may take the GIL.
class Wait {
 public:
  Wait();
  // Called at least every 50 ms of the wait. Raises what the program's signal handler raises.
  void look();

 private:
  uint64_t seen_;  // how many interrupts had come when the wait began
};

// What the bindings know of signals, for only they know Python.
struct SignalHooks {
  uint64_t (*interrupts)() = nullptr;       // that came so far
  void (*check)(uint64_t& seen) = nullptr;  // raises if this wait has to end
};
SignalHooks& signalHooks();

}  // namespace shoal::client
