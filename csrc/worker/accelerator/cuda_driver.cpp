#include "worker/accelerator/cuda_driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <optional>

namespace shoal::worker {
namespace {

constexpr int kSuccess = 0;
constexpr int kCapabilityMajor = 75, kCapabilityMinor = 76;  // of CUdevice_attribute

std::optional<CudaDriver> load() {
  const char* chosen = std::getenv("SHOAL_CUDA_DRIVER");
  void* library = dlopen(chosen != nullptr ? chosen : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return std::nullopt;
  CudaDriver driver{};
  bool whole = true;
  const auto find = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    whole = whole && function != nullptr;
  };
#define FIND(name) find(#name, driver.name)
  FIND(cuInit);
  FIND(cuDeviceGet);
  FIND(cuDeviceGetName);
  FIND(cuDeviceGetAttribute);
  FIND(cuGetErrorString);
  FIND(cuMemHostRegister_v2);
  FIND(cuMemHostUnregister);
#undef FIND
  if (!whole) return std::nullopt;  // not a driver
  return driver;
}

}  // namespace

const CudaDriver* CudaDriver::get() {
  static const std::optional<CudaDriver> driver = load();
  return driver ? &*driver : nullptr;
}

CudaFacts cudaFacts(int ordinal) {
  const CudaDriver* driver = CudaDriver::get();
  int device = 0;
  char name[256] = "";
  CudaFacts facts;
  if (driver == nullptr || driver->cuInit(0) != kSuccess ||
      driver->cuDeviceGet(&device, ordinal) != kSuccess ||
      driver->cuDeviceGetName(name, sizeof name - 1, device) != kSuccess) {
    return facts;
  }
  facts.name = name;
  driver->cuDeviceGetAttribute(&facts.major, kCapabilityMajor, device);
  driver->cuDeviceGetAttribute(&facts.minor, kCapabilityMinor, device);
  return facts;
}

bool cudaRegisterHost(void* host, uint64_t bytes) {
  const CudaDriver* driver = CudaDriver::get();
  return driver != nullptr && driver->cuMemHostRegister_v2(host, bytes, 0) == kSuccess;
}

void cudaUnregisterHost(void* host) {
  if (const CudaDriver* driver = CudaDriver::get()) driver->cuMemHostUnregister(host);
}

}  // namespace shoal::worker
