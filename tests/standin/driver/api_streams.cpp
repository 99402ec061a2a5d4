// Streams, events, copies, and operations on memory in stream order.
#include <atomic>
#include <cstring>

#include "config.h"
#include "context.h"
#include "device_memory.h"
#include "host_memory.h"
#include "standin.h"

using namespace standin;

namespace {

Lane laneOf(uint64_t to, uint64_t from) {
  if (!isDeviceAddress(from)) return Lane::kUp;
  if (!isDeviceAddress(to)) return Lane::kDown;
  return holderOf(to) == holderOf(from) ? Lane::kKernel : Lane::kPeer;
}

void note(Task& task, uint64_t address, uint64_t bytes, bool writes) {
  if (isDeviceAddress(address) || isRegistered(address, bytes)) {
    task.accesses.push_back({address, bytes, writes});
  }
}

// Host memory that is not registered is read and written before the call returns.
bool isLate(uint64_t address, uint64_t bytes) {
  return isDeviceAddress(address) || isRegistered(address, bytes);
}

CUresult copy(Stream& stream, const char* name, uint64_t to, uint64_t from, uint64_t bytes,
              bool waits) {
  if (bytes == 0) return CUDA_SUCCESS;
  Task task{.name = std::string(name) + " of " + std::to_string(bytes) + " bytes"};
  note(task, to, bytes, true);
  note(task, from, bytes, false);
  task.run = [to, from, bytes] { std::memmove(alias(to), alias(from), bytes); };
  task.lane = laneOf(to, from);
  task.takes_time = true;
  task.cost_bytes = bytes;
  const auto point = engine().issue(stream, std::move(task));
  if (!waits && isLate(to, bytes) && isLate(from, bytes)) return CUDA_SUCCESS;
  return engine().wait(point);
}

CUresult fill(void* handle, const char* name, uint64_t to, uint64_t bytes,
              std::function<void()> run, bool waits) {
  Stream* stream = streamOf(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Task task{.name = name};
  note(task, to, bytes, true);
  task.run = std::move(run);
  task.takes_time = true;
  const auto point = engine().issue(*stream, std::move(task));
  return waits ? engine().wait(point) : CUDA_SUCCESS;
}

std::atomic_ref<uint64_t> word(uint64_t address) {
  return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(alias(address)));
}

bool isOpen(uint64_t found, uint64_t wanted, unsigned int how) {
  switch (how & 3) {
    case 0:
      return static_cast<int64_t>(found - wanted) >= 0;
    case 1:
      return found == wanted;
    case 2:
      return (found & wanted) != 0;
    default:
      return ~(found | wanted) != 0;
  }
}

}  // namespace

STANDIN_API CUresult cuStreamCreateWithPriority(void** stream, unsigned int flags, int priority) {
  STANDIN_ENTER(kContext, priority);
  *stream = engine().newStream(currentDevice(), "priority " + std::to_string(priority));
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuStreamCreate(void** stream, unsigned int flags) {
  return cuStreamCreateWithPriority(stream, flags, 0);
}

STANDIN_API CUresult cuStreamDestroy_v2(void* stream) {
  STANDIN_ENTER(kContext);
  if (streamOf(stream) != stream) return CUDA_ERROR_INVALID_HANDLE;
  engine().closeStream(streamOf(stream));
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuStreamSynchronize(void* stream) {
  STANDIN_ENTER(kContext);
  if (streamOf(stream) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return engine().waitForStream(*streamOf(stream));
}

STANDIN_API CUresult cuStreamQuery(void* stream) {
  STANDIN_ENTER(kContext);
  if (streamOf(stream) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (!engine().query(*streamOf(stream))) return CUDA_ERROR_NOT_READY;
  return engine().sticky();
}

STANDIN_API CUresult cuStreamWaitEvent(void* stream, void* event, unsigned int flags) {
  STANDIN_ENTER(kContext);
  if (streamOf(stream) == nullptr || event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  engine().waitFor(*streamOf(stream), *static_cast<Event*>(event));
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuEventCreate(void** event, unsigned int flags) {
  STANDIN_ENTER(kContext, flags);
  *event = new Event{nullptr, 0, (flags & 2) == 0};
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuEventDestroy_v2(void* event) {
  STANDIN_ENTER(kInit);
  delete static_cast<Event*>(event);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuEventRecord(void* event, void* stream) {
  STANDIN_ENTER(kContext);
  if (streamOf(stream) == nullptr || event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  engine().record(*static_cast<Event*>(event), *streamOf(stream));
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuEventQuery(void* handle) {
  STANDIN_ENTER(kContext);
  auto& event = *static_cast<Event*>(handle);
  if (event.point == nullptr) return CUDA_SUCCESS;
  if (!engine().query(event.point, event.asked)) return CUDA_ERROR_NOT_READY;
  return engine().sticky();
}

STANDIN_API CUresult cuEventSynchronize(void* handle) {
  STANDIN_ENTER(kContext);
  auto& event = *static_cast<Event*>(handle);
  return event.point == nullptr ? CUDA_SUCCESS : engine().wait(event.point);
}

STANDIN_API CUresult cuEventElapsedTime_v2(float* ms, void* start, void* end) {
  STANDIN_ENTER(kContext);
  const auto& from = *static_cast<Event*>(start);
  const auto& to = *static_cast<Event*>(end);
  if (from.point == nullptr || to.point == nullptr || !from.timing || !to.timing) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (!from.point->done || !to.point->done) return CUDA_ERROR_NOT_READY;
  *ms = static_cast<float>(static_cast<double>(to.point->time_ns - from.point->time_ns) / 1e6);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuEventElapsedTime(float* ms, void* start, void* end) {
  return cuEventElapsedTime_v2(ms, start, end);
}

STANDIN_API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, void* stream) {
  STANDIN_ENTER(kContext, to, from, bytes);
  if (streamOf(stream) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return copy(*streamOf(stream), "cuMemcpyAsync", to, from, bytes, false);
}

STANDIN_API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes,
                                          void* stream) {
  return cuMemcpyAsync(to, reinterpret_cast<CUdeviceptr>(from), bytes, stream);
}

STANDIN_API CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, void* stream) {
  return cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(to), from, bytes, stream);
}

STANDIN_API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes,
                                          void* stream) {
  return cuMemcpyAsync(to, from, bytes, stream);
}

STANDIN_API CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  STANDIN_ENTER(kContext, to, from, bytes);
  return copy(*streamOf(nullptr), "cuMemcpy", to, from, bytes, true);
}

STANDIN_API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  return cuMemcpy(to, reinterpret_cast<CUdeviceptr>(from), bytes);
}

STANDIN_API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  return cuMemcpy(reinterpret_cast<CUdeviceptr>(to), from, bytes);
}

STANDIN_API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count,
                                     void* stream) {
  STANDIN_ENTER(kContext, to, count);
  return fill(
      stream, "cuMemsetD8Async", to, count, [=] { std::memset(alias(to), value, count); }, false);
}

STANDIN_API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count,
                                      void* stream) {
  STANDIN_ENTER(kContext, to, count);
  return fill(
      stream, "cuMemsetD32Async", to, count * 4,
      [=] {
        auto* words = reinterpret_cast<uint32_t*>(alias(to));
        for (size_t i = 0; i < count; ++i) words[i] = value;
      },
      false);
}

STANDIN_API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
  STANDIN_ENTER(kContext, to, count);
  return fill(
      nullptr, "cuMemsetD8", to, count, [=] { std::memset(alias(to), value, count); }, true);
}

STANDIN_API CUresult cuStreamWriteValue64_v2(void* handle, CUdeviceptr address, uint64_t value,
                                             unsigned int flags) {
  STANDIN_ENTER(kContext, address, value);
  Stream* stream = streamOf(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (address % 8 != 0 || !isLate(address, 8)) return CUDA_ERROR_INVALID_VALUE;
  Task task{.name = "cuStreamWriteValue64"};
  task.run = [=] { word(address).store(value, std::memory_order_release); };
  task.host_may_poll = true;
  engine().issue(*stream, std::move(task));
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuStreamWaitValue64_v2(void* handle, CUdeviceptr address, uint64_t value,
                                            unsigned int how) {
  STANDIN_ENTER(kContext, address, value, how);
  Stream* stream = streamOf(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (address % 8 != 0 || !isLate(address, 8)) return CUDA_ERROR_INVALID_VALUE;
  Task task{.name = "cuStreamWaitValue64"};
  task.gate = [=] { return isOpen(word(address).load(std::memory_order_acquire), value, how); };
  engine().issue(*stream, std::move(task));
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuLaunchHostFunc(void* handle, CUhostFn function, void* data) {
  STANDIN_ENTER(kContext);
  Stream* stream = streamOf(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Task task{.name = "cuLaunchHostFunc"};
  task.run = [=] { function(data); };
  task.host_may_poll = true;
  engine().issue(*stream, std::move(task));
  return CUDA_SUCCESS;
}

namespace standin {

CUresult launch(void* handle, const std::string& name, std::vector<Access> accesses,
                std::function<void()> run) {
  if (const CUresult failed = enter("cuLaunchKernel", Needs::kContext, name)) return failed;
  Stream* stream = streamOf(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Task task{.name = name, .accesses = std::move(accesses), .run = std::move(run)};
  task.kernel = true;
  task.takes_time = true;
  engine().issue(*stream, std::move(task));
  return CUDA_SUCCESS;
}

std::byte* aliasOf(const void* address) {
  return alias(reinterpret_cast<uint64_t>(address));
}

bool isRegisteredHost(const void* address, uint64_t bytes) {
  return isRegistered(reinterpret_cast<uint64_t>(address), bytes);
}

std::string errorText(CUresult error) {
  return engine().sticky() == error ? engine().stickyText() : std::string();
}

int deviceCount() {
  return config().devices;
}

}  // namespace standin
