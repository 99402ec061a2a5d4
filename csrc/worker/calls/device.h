// What the worker needs of its device beyond operators, through torch's device-neutral interfaces:
// memory, raw copies, time and generators. The same code serves CPU and accelerators.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <optional>
#include <unordered_map>

#include "transport/progress.h"

namespace shoal::worker {

class DeviceMemory {
 public:
  explicit DeviceMemory(c10::Device device) : device_(device) {}

  c10::Device device() const { return device_; }
  bool isHost() const { return device_.is_cpu(); }
  c10::Storage allocate(uint64_t bytes) const;
  void copyIn(void* device_data, const void* host, uint64_t bytes) const;
  void copyOut(void* host, const void* device_data, uint64_t bytes) const;
  void copyWithin(void* to, const void* from, uint64_t bytes) const;
  void synchronize() const;
  void emptyCache() const;

 private:
  c10::Device device_;
};

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
  // Whether the device has done all work from before the event (0: all so far). Never waits.
  bool isPast(uint64_t event) const;
  void drop(uint64_t event);

 private:
  c10::Device device_;
  transport::Progress* progress_;
  std::unordered_map<uint64_t, transport::Passed> moments_;
  std::unordered_map<uint64_t, c10::Event> device_events_;
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
