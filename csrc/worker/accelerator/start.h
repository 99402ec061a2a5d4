// Starts an accelerator in this process, by torch's device-neutral calls. Only a forked child does
// this: after it, a fork of the process cannot use the device.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace shoal::worker {

// Initializes the device's runtime and makes it the calling thread's current device, with streams
// of its own. torch's allocator works on the *current* device, whatever device a tensor names.
// Does nothing for a CPU device.
void startDevice(c10::Device device);
// The same for another thread of the process, which waits for the device but issues nothing.
void enterDevice(c10::Device device);

struct DeviceBytes {
  uint64_t free, total;
};
// The device's memory as its driver counts it, over all processes. After startDevice().
DeviceBytes bytesOf(c10::Device device);

}  // namespace shoal::worker
