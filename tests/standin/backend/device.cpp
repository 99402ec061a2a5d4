// Devices, streams and events, as torch asks for them.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <mutex>

#include "../driver/api.h"
#include "../driver/standin.h"
#include "backend.h"

namespace standin {
namespace {

constexpr int kDevicesMax = 16;
constexpr size_t kPoolStreams = 8;

thread_local c10::DeviceIndex current_device = 0;
thread_local c10::DeviceIndex bound_device = -1;  // whose context is the thread's
thread_local c10::StreamId current_streams[kDevicesMax] = {};

void* makeStream(c10::DeviceIndex device, int priority) {
  ensureDevice(device);
  void* stream = nullptr;
  check(cuStreamCreateWithPriority(&stream, 1, priority), "cuStreamCreate");
  return stream;
}

c10::Stream streamFrom(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), id);
}

c10::Stream poolStream(c10::DeviceIndex device) {
  static std::mutex lock;
  static std::vector<void*> streams[kDevicesMax];
  static size_t next = 0;
  const std::lock_guard guard(lock);
  auto& pool = streams[device];
  if (pool.size() < kPoolStreams) pool.push_back(makeStream(device, 0));
  return streamFrom(device, reinterpret_cast<c10::StreamId>(pool[next++ % pool.size()]));
}

}  // namespace

void check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  cuGetErrorString(result, &text);
  std::string message =
      std::string("CUDA error: ") + (text != nullptr ? text : "unknown error") + " (" + what + ")";
  const std::string details = errorText(result);
  if (!details.empty()) message += "\n" + details;
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, message);
  }
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, result, message);
}

void ensureDevice(c10::DeviceIndex device) {
  if (bound_device == device) return;
  static std::mutex lock;
  static void* contexts[kDevicesMax] = {};
  const std::lock_guard guard(lock);
  check(cuInit(0), "cuInit");
  TORCH_CHECK(device >= 0 && device < deviceCount(), "CUDA error: invalid device ordinal ",
              static_cast<int>(device));
  if (contexts[device] == nullptr) {
    void* context = nullptr;
    check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    contexts[device] = context;
  }
  check(cuCtxSetCurrent(contexts[device]), "cuCtxSetCurrent");
  bound_device = device;
}

c10::DeviceIndex currentDeviceIndex() {
  return current_device;
}

c10::Stream currentStream(c10::DeviceIndex device) {
  return streamFrom(device, current_streams[device]);
}

void* handleOf(const c10::Stream& stream) {
  return reinterpret_cast<void*>(stream.id());
}

void synchronize(const c10::Stream& stream) {
  ensureDevice(stream.device_index());
  check(cuStreamSynchronize(handleOf(stream)), "cuStreamSynchronize");
}

void orderBehind(const c10::Stream& waits, const c10::Stream& until) {
  if (waits == until) return;
  void* event = nullptr;
  ensureDevice(until.device_index());
  check(cuEventCreate(&event, 2), "cuEventCreate");
  check(cuEventRecord(event, handleOf(until)), "cuEventRecord");
  ensureDevice(waits.device_index());
  check(cuStreamWaitEvent(handleOf(waits), event, 0), "cuStreamWaitEvent");
  cuEventDestroy_v2(event);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, current_device}; }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(standin::deviceCount());
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override {
    return currentStream(device.index() < 0 ? current_device : device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return streamFrom(device.index() < 0 ? current_device : device.index(), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return poolStream(device.index() < 0 ? current_device : device.index());
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    const c10::DeviceIndex index = device.index() < 0 ? current_device : device.index();
    return streamFrom(index, reinterpret_cast<c10::StreamId>(makeStream(index, priority)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = currentStream(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return handleOf(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    ensureDevice(stream.device_index());
    const CUresult result = cuStreamQuery(handleOf(stream));
    if (result != CUDA_ERROR_NOT_READY) check(result, "cuStreamQuery");
    return result == CUDA_SUCCESS;
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    ensureDevice(device);
    check(cuCtxSynchronize(), "cuCtxSynchronize");
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    ensureDevice(stream.device_index());
    if (*event == nullptr) {
      const unsigned int flags = flag == c10::EventFlag::BACKEND_DEFAULT ? 0 : 2;
      check(cuEventCreate(event, flags), "cuEventCreate");
    }
    check(cuEventRecord(*event, handleOf(stream)), "cuEventRecord");
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    ensureDevice(stream.device_index());
    check(cuStreamWaitEvent(handleOf(stream), event, 0), "cuStreamWaitEvent");
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    ensureDevice(current_device);
    const CUresult result = cuEventQuery(event);
    if (result != CUDA_ERROR_NOT_READY) check(result, "cuEventQuery");
    return result == CUDA_SUCCESS;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    ensureDevice(current_device);
    check(cuEventSynchronize(event), "cuEventSynchronize");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) cuEventDestroy_v2(event);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex device) const override {
    ensureDevice(device);
    float ms = 0;
    check(cuEventElapsedTime_v2(&ms, start, end), "cuEventElapsedTime");
    return ms;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    c10::getDeviceAllocator(c10::kCUDA)->recordStream(data, stream);
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace standin
