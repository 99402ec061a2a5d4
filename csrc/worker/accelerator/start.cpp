#include "worker/accelerator/start.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace shoal::worker {

void startDevice(c10::Device device) {
  if (device.is_cpu()) return;
  TORCH_CHECK(device.has_index(), "an accelerator needs an index: ", device);
  at::globalContext().lazyInitDevice(device.type());
  const c10::impl::VirtualGuardImpl guard(device.type());
  TORCH_CHECK(device.index() < guard.deviceCount(), device, " does not exist: there are ",
              static_cast<int>(guard.deviceCount()), " devices of this type");
  guard.setDevice(device);
  guard.exchangeStream(guard.getNewStream(device));
}

void enterDevice(c10::Device device) {
  c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
}

DeviceBytes bytesOf(c10::Device device) {
  const auto [free, total] = c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index());
  return {free, total};
}

}  // namespace shoal::worker
