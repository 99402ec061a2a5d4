// The hooks by which torch finds the device's generators, pinned memory and allocator.
#include "client/torch/hooks.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/library.h>

#include "client/space/devices.h"
#include "client/space/host_memory.h"
#include "client/tensor/generator.h"
#include "client/tensor/tensor.h"
#include "client/torch/kernels.h"

namespace shoal::client {
namespace {

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return Devices::get().wanted(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return Devices::get().attached(); }
  void init() const override {}  // a lease is taken where one is needed
  c10::DeviceIndex deviceCount() const override { return Devices::get().count(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { Devices::setCurrent(device); }
  c10::DeviceIndex getCurrentDevice() const override { return Devices::current(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = Devices::current();
    Devices::setCurrent(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? Devices::current() : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return defaultGenerator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return newGenerator(index);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    const auto address = reinterpret_cast<wire::Address>(data);
    Session& session = Devices::get().owner(address);
    const auto base = wire::makeAddress(session.number(), wire::slotOf(address));
    return {c10::DeviceType::PrivateUse1, session.deviceOf(base, session.lock())};
  }
  bool isPinnedPtr(const void* data) const override {
    return HostMemory::exists() && HostMemory::get().contains(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    // What torch says where there is no accelerator.
    TORCH_CHECK(Devices::get().wanted(),
                "Cannot access accelerator device when none is available.");
    return HostMemory::pinnedAllocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resizeStorage(storage, bytes);
  }
};

}  // namespace

void registerHooks() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(c10::DeviceType::PrivateUse1, allocator());
  registerGuard();
  const auto library = [](c10::DispatchKey key) {
    return new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  };
  static auto* device = library(c10::DispatchKey::PrivateUse1);
  static auto* autograd = library(c10::DispatchKey::AutogradPrivateUse1);
  registerViews(*device, *autograd);
  registerCopies(*device);
}

}  // namespace shoal::client
