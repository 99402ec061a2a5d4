// The torch side of the stand-in: a `cuda` for a CPU build of torch, on the stand-in's driver.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Stream.h>

#include <functional>
#include <string>
#include <vector>

#include "../driver/checker.h"
#include "../driver/cuda_types.h"

namespace standin {

// Throws what torch throws on a CUDA device.
void check(CUresult result, const char* what);

// --- device.cpp
void ensureDevice(c10::DeviceIndex device);  // makes its context the thread's
c10::DeviceIndex currentDeviceIndex();
c10::Stream currentStream(c10::DeviceIndex device);
void* handleOf(const c10::Stream& stream);
void synchronize(const c10::Stream& stream);
void orderBehind(const c10::Stream& waits, const c10::Stream& until);  // all that is there now

// --- allocator.cpp
c10::Allocator* deviceAllocator();
c10::Allocator* pinnedAllocator();

// --- generator.cpp
// Where a random operator's numbers start. They depend on the order of the calls alone.
uint64_t drawFrom(const std::optional<at::Generator>& generator, c10::DeviceIndex device,
                  uint64_t numbers);
const at::Generator& defaultGenerator(c10::DeviceIndex device);
at::Generator newGenerator(c10::DeviceIndex device);

// --- tensors.cpp
// CPU tensors over the memory of device tensors, as a kernel sees it. They own nothing.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor);

 private:
  std::vector<std::pair<const void*, c10::Storage>> storages_;  // tensors that share go on sharing
};
Access accessOf(const at::Tensor& tensor, bool writes);
at::Tensor emptyLike(const c10::IntArrayRef sizes, const c10::IntArrayRef strides,
                     at::ScalarType dtype, c10::Device device);
// Gives an output other sizes, with new memory where it must.
void reshapeOutput(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides);

// --- launch.cpp
// Queues host code that computes on aliases.
void launchOn(c10::DeviceIndex device, const std::string& name, std::vector<Access> accesses,
              std::function<void()> run);
// Runs it as a kernel and waits; what it throws, this throws.
void runNow(c10::DeviceIndex device, const std::string& name, std::vector<Access> accesses,
            const std::function<void()>& run);

// --- fallback.cpp
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace standin
