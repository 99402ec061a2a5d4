// A device's memory through torch's device-neutral interfaces: blocks, and copies of bytes. The
// same code serves CPU and accelerators.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstdint>

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

}  // namespace shoal::worker
