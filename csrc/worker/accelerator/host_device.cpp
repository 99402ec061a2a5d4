#include "worker/accelerator/host_device.h"

#include <c10/core/Allocator.h>

#include <cstring>

namespace shoal::worker {
namespace {

// The ranges may overlap: an adopted segment is host memory.
void copy(void* to, const void* from, uint64_t bytes) {
  if (bytes > 0) std::memmove(to, from, bytes);
}

}  // namespace

c10::Storage HostDevice::allocate(uint64_t bytes) {
  auto* allocator = c10::GetAllocator(c10::DeviceType::CPU);
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, allocator->allocate(bytes), allocator,
                      /*resizable=*/true);
}

void HostDevice::copyIn(Lane, void* device_data, const void* host, uint64_t bytes) {
  copy(device_data, host, bytes);
}

void HostDevice::copyOut(Lane, void* host, const void* device_data, uint64_t bytes) {
  copy(host, device_data, bytes);
}

void HostDevice::copyWithin(void* to, const void* from, uint64_t bytes) {
  copy(to, from, bytes);
}

}  // namespace shoal::worker
