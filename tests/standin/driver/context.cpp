#include "context.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <set>

#include "config.h"
#include "shared_state.h"

namespace standin {
namespace {

constexpr int kDevicesMax = 16;

struct Contexts {
  std::mutex lock;
  pid_t initialised_in = 0;  // of the process; 0: none yet
  int retained[kDevicesMax] = {};
  Stream* default_stream[kDevicesMax] = {};
};

Contexts& contexts() {
  static Contexts made;
  return made;
}

thread_local int current_device = -1;

int logFile() {
  static const int fd = [] {
    const char* path = std::getenv("STANDIN_LOG");
    if (path == nullptr || *path == '\0') return -1;
    return open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  }();
  return fd;
}

// Errors of asking for memory are those of a full device: the one that programs handle.
CUresult injected(const char* name) {
  const bool allocates = std::strstr(name, "cuMemCreate") != nullptr ||
                         std::strstr(name, "cuMemAlloc") != nullptr ||
                         std::strstr(name, "cuMemHostAlloc") != nullptr;
  return allocates ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_UNKNOWN;
}

}  // namespace

bool logging() {
  return logFile() >= 0;
}

CUresult enter(const char* name, Needs needs, const std::string& arguments) {
  if (logging()) {
    const std::string line = std::to_string(getpid()) + ' ' + name + arguments + '\n';
    if (write(logFile(), line.data(), line.size()) < 0) return CUDA_ERROR_UNKNOWN;
  }
  const uint64_t number = counters().driver_calls.fetch_add(1) + 1;
  if (needs != Needs::kNothing && contexts().initialised_in != getpid()) {
    return CUDA_ERROR_NOT_INITIALIZED;
  }
  if (number == counters().fail_call.load(std::memory_order_relaxed)) return injected(name);
  if (needs != Needs::kContext) return CUDA_SUCCESS;
  if (current_device < 0) return CUDA_ERROR_INVALID_CONTEXT;
  return engine().sticky();
}

CUresult init() {
  Contexts& all = contexts();
  const std::lock_guard guard(all.lock);
  if (all.initialised_in == 0) all.initialised_in = getpid();
  // A child of a process that used the driver gets nothing of it, and cannot start it again.
  return all.initialised_in == getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult retain(int device) {
  Contexts& all = contexts();
  const std::lock_guard guard(all.lock);
  if (all.retained[device] == 0) {
    if (!take(device, config().context_bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    if (all.default_stream[device] == nullptr) {
      all.default_stream[device] = engine().newStream(device, "the default stream");
    }
  }
  ++all.retained[device];
  return CUDA_SUCCESS;
}

CUresult release(int device) {
  Contexts& all = contexts();
  const std::lock_guard guard(all.lock);
  if (all.retained[device] == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (--all.retained[device] == 0) giveBack(device, config().context_bytes);
  return CUDA_SUCCESS;
}

bool hasContext(int device) {
  Contexts& all = contexts();
  const std::lock_guard guard(all.lock);
  return all.initialised_in == getpid() && all.retained[device] > 0;
}

int currentDevice() {
  return current_device;
}

void setCurrentDevice(int device) {
  current_device = device;
}

Stream* streamOf(void* handle) {
  const auto value = reinterpret_cast<uintptr_t>(handle);
  if (value > 2) return static_cast<Stream*>(handle);
  return current_device < 0 ? nullptr : contexts().default_stream[current_device];
}

}  // namespace standin
