#include "worker/accelerator/device_memory.h"

#include <ATen/Functions.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>

namespace shoal::worker {
namespace {

at::Tensor blob(const void* data, uint64_t bytes, c10::Device device) {
  return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(bytes)},
                       at::TensorOptions().dtype(at::kByte).device(device));
}

}  // namespace

c10::Storage DeviceMemory::allocate(uint64_t bytes) const {
  auto* allocator = c10::GetAllocator(device_.type());
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, allocator->allocate(bytes), allocator,
                      /*resizable=*/true);
}

void DeviceMemory::copyIn(void* device_data, const void* host, uint64_t bytes) const {
  if (bytes == 0) return;
  if (isHost()) {
    std::memmove(device_data, host, bytes);  // an adopted segment may overlap the host range
  } else {
    blob(device_data, bytes, device_).copy_(blob(host, bytes, at::kCPU));
  }
}

void DeviceMemory::copyOut(void* host, const void* device_data, uint64_t bytes) const {
  if (bytes == 0) return;
  if (isHost()) {
    std::memmove(host, device_data, bytes);
  } else {
    blob(host, bytes, at::kCPU).copy_(blob(device_data, bytes, device_));
  }
}

void DeviceMemory::copyWithin(void* to, const void* from, uint64_t bytes) const {
  if (bytes == 0) return;
  if (isHost()) {
    std::memmove(to, from, bytes);
  } else {
    blob(to, bytes, device_).copy_(blob(from, bytes, device_));
  }
}

void DeviceMemory::synchronize() const {
  if (!isHost()) {
    c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
  }
}

void DeviceMemory::emptyCache() const {
  if (!isHost()) c10::getDeviceAllocator(device_.type())->emptyCache();
}

}  // namespace shoal::worker
