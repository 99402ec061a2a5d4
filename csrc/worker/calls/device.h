// What the worker needs of its device beyond operators and memory, through torch's device-neutral
// interfaces: time and generators. The same code serves CPU and accelerators.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "transport/progress.h"

namespace shoal::worker {

// Points in the stream, and the time between them as the device saw it.
class Events {
 public:
  // The client reads in `progress` when an event is past; null: it does not.
  Events(c10::Device device, transport::Progress* progress)
      : device_(device), progress_(progress) {}
  void record(uint64_t event, transport::Passed now);
  struct Elapsed {
    double all_ms;
    double waited_ms;  // of that, for other devices of the lease
  };
  Elapsed elapsed(uint64_t start, uint64_t end);
  void drop(uint64_t event);

 private:
  c10::Device device_;
  transport::Progress* progress_;
  std::unordered_map<uint64_t, transport::Passed> moments_;
  std::unordered_map<uint64_t, c10::Event> device_events_;
  std::vector<c10::Event> spare_;  // making one costs more than recording it
};

// Generator 0 is the device's default one.
class Generators {
 public:
  explicit Generators(c10::Device device) : device_(device) {}
  at::Generator& get(uint64_t number);
  void drop(uint64_t number) { made_.erase(number); }

 private:
  c10::Device device_;
  std::unordered_map<uint64_t, at::Generator> made_;
};

}  // namespace shoal::worker
