// A small NVML: what is known of the stand-in's devices without starting a context.
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "../driver/config.h"
#include "../driver/shared_state.h"

#define NVML_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidArgument = 2;
constexpr int kNotSupported = 3;
constexpr int kInsufficientSize = 7;

struct Memory {
  unsigned long long total, free, used;
};
struct MemoryV2 {
  unsigned int version;
  unsigned long long total, reserved, free, used;
};
struct Utilization {
  unsigned int gpu, memory;
};

int deviceOf(void* handle) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(handle)) - 1;
}

bool exists(int device) {
  return device >= 0 && device < standin::config().devices;
}

int write(char* to, unsigned int length, const char* format, int number) {
  const int needed = std::snprintf(to, length, format, number);
  return static_cast<unsigned int>(needed) < length ? kSuccess : kInsufficientSize;
}

}  // namespace

NVML_API int nvmlInit_v2() {
  return kSuccess;
}
NVML_API int nvmlInitWithFlags(unsigned int) {
  return kSuccess;
}
NVML_API int nvmlShutdown() {
  return kSuccess;
}
NVML_API const char* nvmlErrorString(int error) {
  return error == kSuccess            ? "Success"
         : error == kInvalidArgument  ? "Invalid Argument"
         : error == kInsufficientSize ? "Insufficient Size"
                                      : "Not Supported";
}

NVML_API int nvmlDeviceGetCount_v2(unsigned int* count) {
  *count = static_cast<unsigned int>(standin::config().devices);
  return kSuccess;
}

NVML_API int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void** handle) {
  if (!exists(static_cast<int>(index))) return kInvalidArgument;
  *handle = reinterpret_cast<void*>(static_cast<uintptr_t>(index) + 1);
  return kSuccess;
}

// Both forms of the name: cuDeviceGetUuid gives the bytes behind "GPU-".
NVML_API int nvmlDeviceGetUUID(void* handle, char* to, unsigned int length) {
  if (!exists(deviceOf(handle))) return kInvalidArgument;
  char bytes[32] = {};
  std::snprintf(bytes, sizeof bytes, "stand-in-%06d", deviceOf(handle));
  char text[64] = "GPU-";
  size_t at = 4;
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text[at++] = '-';
    at += static_cast<size_t>(std::snprintf(text + at, sizeof text - at, "%02x", bytes[i]));
  }
  if (at >= length) return kInsufficientSize;
  std::memcpy(to, text, at + 1);
  return kSuccess;
}

NVML_API int nvmlDeviceGetName(void* handle, char* to, unsigned int length) {
  if (!exists(deviceOf(handle))) return kInvalidArgument;
  return write(to, length, "stand-in %d", deviceOf(handle));
}

NVML_API int nvmlDeviceGetMemoryInfo(void* handle, Memory* memory) {
  if (!exists(deviceOf(handle))) return kInvalidArgument;
  const uint64_t total = standin::config().memory_bytes;
  const uint64_t used = standin::usedBytes(deviceOf(handle));
  *memory = {total, used < total ? total - used : 0, used};
  return kSuccess;
}

NVML_API int nvmlDeviceGetMemoryInfo_v2(void* handle, MemoryV2* memory) {
  Memory found{};
  const int result = nvmlDeviceGetMemoryInfo(handle, &found);
  if (result == kSuccess) {
    memory->total = found.total;
    memory->reserved = 0;
    memory->free = found.free;
    memory->used = found.used;
  }
  return result;
}

NVML_API int nvmlDeviceGetUtilizationRates(void* handle, Utilization* rates) {
  if (!exists(deviceOf(handle))) return kInvalidArgument;
  const bool busy = standin::usedBytes(deviceOf(handle)) > 0;
  *rates = {busy ? 50U : 0U, busy ? 25U : 0U};
  return kSuccess;
}

NVML_API int nvmlDeviceGetTemperature(void* handle, int sensor, unsigned int* celsius) {
  if (!exists(deviceOf(handle))) return kInvalidArgument;
  *celsius = 40 + static_cast<unsigned int>(deviceOf(handle));
  return kSuccess;
}

NVML_API int nvmlDeviceGetPowerUsage(void* handle, unsigned int* milliwatts) {
  if (!exists(deviceOf(handle))) return kInvalidArgument;
  *milliwatts = 50000;
  return kSuccess;
}

NVML_API int nvmlDeviceGetEnforcedPowerLimit(void* handle, unsigned int* milliwatts) {
  if (!exists(deviceOf(handle))) return kInvalidArgument;
  *milliwatts = 300000;
  return kSuccess;
}

NVML_API int nvmlDeviceGetCudaComputeCapability(void* handle, int* major, int* minor) {
  if (!exists(deviceOf(handle))) return kInvalidArgument;
  *major = 8;
  *minor = 0;
  return kSuccess;
}

NVML_API int nvmlSystemGetDriverVersion(char* to, unsigned int length) {
  return write(to, length, "stand-in", 0);
}
