// What torch asks of an accelerator beside its kernels, and the generators.
#include <ATen/core/Generator.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/GeneratorImpl.h>

#include <array>
#include <cstring>
#include <mutex>

#include "../driver/api.h"
#include "../driver/standin.h"
#include "backend.h"

namespace standin {
namespace {

// A counter-based generator: seed and offset are its whole state, 16 bytes as CUDA's.
struct PhiloxGenerator final : c10::GeneratorImpl {
  explicit PhiloxGenerator(c10::DeviceIndex device)
      : GeneratorImpl({c10::kCUDA, device}, c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    const auto* bytes = static_cast<const char*>(state.data());
    std::memcpy(&seed_, bytes, 8);
    std::memcpy(&offset_, bytes + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* bytes = state.data_ptr<uint8_t>();
    std::memcpy(bytes, &seed_, 8);
    std::memcpy(bytes + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  // What the next operator draws from; it may draw so many numbers.
  uint64_t draw(uint64_t numbers) {
    at::Philox4_32 mixer(seed_, /*subsequence=*/offset_, 0);
    const uint64_t high = mixer();
    const uint64_t found = high << 32 | mixer();
    offset_ += (numbers / 4 + 1) * 4;
    return found;
  }

 private:
  c10::GeneratorImpl* clone_impl() const override {
    auto* copy = new PhiloxGenerator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

}  // namespace

at::Generator newGenerator(c10::DeviceIndex device) {
  return at::make_generator<PhiloxGenerator>(device < 0 ? currentDeviceIndex() : device);
}

const at::Generator& defaultGenerator(c10::DeviceIndex device) {
  static std::array<at::Generator, 16> made;
  static std::mutex lock;
  const std::lock_guard guard(lock);
  at::Generator& found = made.at(static_cast<size_t>(device < 0 ? currentDeviceIndex() : device));
  if (!found.defined()) found = newGenerator(device);
  return found;
}

uint64_t drawFrom(const std::optional<at::Generator>& generator, c10::DeviceIndex device,
                  uint64_t numbers) {
  at::Generator used =
      generator.has_value() && generator->defined() ? *generator : defaultGenerator(device);
  auto* philox = dynamic_cast<PhiloxGenerator*>(used.unsafeGetGeneratorImpl());
  TORCH_CHECK(philox != nullptr, "Expected a 'cuda' device type for generator but found '",
              used.device().type(), "'");
  const std::lock_guard guard(used.mutex());
  return philox->draw(numbers);
}

}  // namespace standin

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}

  void init() const override { standin::ensureDevice(standin::currentDeviceIndex()); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return deviceCount() > 0; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex device) const override {
    unsigned int flags = 0;
    int active = 0;
    return cuDevicePrimaryCtxGetState(device, &flags, &active) == CUDA_SUCCESS && active != 0;
  }
  DeviceIndex deviceCount() const override {
    return static_cast<DeviceIndex>(standin::deviceCount());
  }
  int getNumGPUs() const override { return standin::deviceCount(); }
  DeviceIndex current_device() const override { return getCurrentDevice(); }
  DeviceIndex getCurrentDevice() const override { return standin::currentDeviceIndex(); }
  void setCurrentDevice(DeviceIndex device) const override { exchangeDevice(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return c10::impl::getDeviceGuardImpl(kCUDA)->exchangeDevice({kCUDA, device}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  void deviceSynchronize(DeviceIndex device) const override {
    c10::impl::getDeviceGuardImpl(kCUDA)->synchronizeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return standin::isRegisteredHost(data, 1); }
  Allocator* getPinnedMemoryAllocator() const override { return standin::pinnedAllocator(); }
  Allocator* getCUDADeviceAllocator() const override { return standin::deviceAllocator(); }
  Device getDeviceFromPtr(void* data) const override {
    int device = 0;
    standin::ensureDevice(standin::currentDeviceIndex());
    standin::check(cuPointerGetAttribute(&device, 9, reinterpret_cast<CUdeviceptr>(data)),
                   "cuPointerGetAttribute");
    return {kCUDA, static_cast<DeviceIndex>(device)};
  }
  const Generator& getDefaultGenerator(DeviceIndex device) const override {
    return standin::defaultGenerator(device);
  }
  Generator getNewGenerator(DeviceIndex device) const override {
    return standin::newGenerator(device);
  }
  std::string showConfig() const override { return "the stand-in"; }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
