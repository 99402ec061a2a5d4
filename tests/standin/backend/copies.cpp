// Memory, views and copies: what torch wants of a backend before any operator.
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "../driver/api.h"
#include "../driver/standin.h"
#include "call.h"

namespace standin {
namespace {

c10::Device deviceOr(std::optional<c10::Device> device) {
  if (device.has_value() && device->has_index()) return *device;
  return {c10::kCUDA, currentDeviceIndex()};
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>,
                 std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(deviceOr(device));
  const auto type = c10::dtype_or_default(dtype);
  const auto key = c10::computeDispatchKey(type, c10::kStrided, guard.current_device());
  return at::Tensor(
      at::detail::empty_generic(sizes, deviceAllocator(), c10::DispatchKeySet(key), type, format));
}

at::Tensor emptyStrided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                        std::optional<at::ScalarType> dtype, std::optional<c10::Layout>,
                        std::optional<c10::Device> device, std::optional<bool>) {
  return emptyLike(sizes, strides, c10::dtype_or_default(dtype), deviceOr(device));
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef sizes,
                         std::optional<c10::MemoryFormat> format) {
  const auto dense = c10::contiguous_strides(sizes);
  std::vector<int64_t> strides(dense.begin(), dense.end());
  if (format == c10::MemoryFormat::ChannelsLast) strides = c10::get_channels_last_strides_2d(sizes);
  if (format == c10::MemoryFormat::ChannelsLast3d)
    strides = c10::get_channels_last_strides_3d(sizes);
  auto* storage = self.storage().unsafeGetStorageImpl();
  const size_t held = storage->nbytes();
  const auto bytes = static_cast<size_t>(at::detail::computeStorageNbytes(
      sizes, strides, self.itemsize(), static_cast<size_t>(self.storage_offset())));
  if (held > 0 && bytes > held) {  // growing keeps what was there
    const c10::DeviceGuard guard(self.device());
    c10::DataPtr grown = deviceAllocator()->allocate(bytes);
    check(cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(grown.get()),
                        reinterpret_cast<CUdeviceptr>(storage->data()), held,
                        handleOf(currentStream(self.device().index()))),
          "resize_");
    storage->set_data_ptr_noswap(std::move(grown));
    storage->set_nbytes(bytes);
  }
  reshapeOutput(self, sizes, strides);
  return self;
}

at::Tensor& setStorage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes,
                       c10::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const auto dense = c10::contiguous_strides(sizes);
  impl->set_sizes_and_strides(sizes, strides.empty() ? c10::IntArrayRef(dense) : strides, offset);
  return self;
}

at::Tensor& setWholeStorage(at::Tensor& self, at::Storage source) {
  const auto items = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return setStorage(self, std::move(source), 0, {items}, {});
}

at::Tensor& setTensor(at::Tensor& self, const at::Tensor& source) {
  return setStorage(self, source.storage(), source.storage_offset(), source.sizes(),
                    source.strides());
}

at::Tensor& setNothing(at::Tensor& self) {
  return setStorage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, deviceAllocator(), true),
                    0, {0}, {});
}

bool copiesBytes(const at::Tensor& to, const at::Tensor& from) {
  return to.scalar_type() == from.scalar_type() && to.is_conj() == from.is_conj() &&
         to.is_neg() == from.is_neg() && to.is_non_overlapping_and_dense() &&
         to.strides() == from.strides();
}

bool isPinned(const at::Tensor& tensor) {
  const Access access = accessOf(tensor, false);
  return isRegisteredHost(reinterpret_cast<const void*>(access.address), access.bytes);
}

at::Tensor& copy(at::Tensor& to, const at::Tensor& source, bool non_blocking) {
  const at::Tensor from = source.expand_as(to);
  if (to.numel() == 0 || to.is_same(source)) return to;
  // Between devices the source's stream copies, as CUDA's, and both streams wait for each other.
  const c10::Device where = from.is_cuda() ? from.device() : to.device();
  const c10::DeviceGuard guard(where);
  const c10::Stream stream = currentStream(where.index());
  const bool peers = from.is_cuda() && to.is_cuda() && from.device() != to.device();
  const c10::Stream other = currentStream((peers            ? to
                                           : from.is_cuda() ? from
                                                            : to)
                                              .device()
                                              .index());
  if (peers) orderBehind(stream, other);
  ensureDevice(where.index());
  if (copiesBytes(to, from)) {
    check(cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(to.data_ptr()),
                        reinterpret_cast<CUdeviceptr>(from.const_data_ptr()), to.nbytes(),
                        handleOf(stream)),
          "copy_");
  } else {
    // A host tensor is kept until the kernel has run; whoever does not wait holds it still.
    Aliases aliases;
    const at::Tensor target = to.is_cuda() ? aliases.of(to) : to;
    const at::Tensor origin = from.is_cuda() ? aliases.of(from) : from;
    std::vector<Access> accesses;
    if (to.is_cuda() || isPinned(to)) accesses.push_back(accessOf(to, true));
    if (from.is_cuda() || isPinned(from)) accesses.push_back(accessOf(from, false));
    launchOn(where.index(), "aten::copy_", std::move(accesses),
             [target, origin, threads = at::get_num_threads()] {
               const OnCpu on_cpu(threads);
               target.copy_(origin);
             });
  }
  if (peers) orderBehind(other, stream);
  const bool has_host = from.is_cpu() || to.is_cpu();
  if (has_host && (!non_blocking || !isPinned(from.is_cpu() ? from : to))) synchronize(stream);
  return to;
}

at::Scalar localScalar(const at::Tensor& self) {
  const at::Tensor host = at::empty({}, self.options().device(at::kCPU));
  const c10::DeviceGuard guard(self.device());
  host.copy_(self);
  return host.item();
}

void recordStream(at::Tensor& self, c10::Stream stream) {
  c10::getDeviceAllocator(c10::kCUDA)->recordStream(self.storage().data_ptr(), stream);
}

}  // namespace
}  // namespace standin

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", standin::empty);
  m.impl("empty_strided", standin::emptyStrided);
  m.impl("resize_", standin::resize);
  m.impl("set_.source_Storage_storage_offset", standin::setStorage);
  m.impl("set_.source_Storage", standin::setWholeStorage);
  m.impl("set_.source_Tensor", standin::setTensor);
  m.impl("set_", standin::setNothing);
  m.impl("view", at::native::view);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("copy_", standin::copy);
  m.impl("_local_scalar_dense", standin::localScalar);
  m.impl("record_stream", standin::recordStream);
  // Their generic kernels choose between libraries that only CUDA has.
  for (const char* name : {"convolution", "convolution_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&standin::fallback>());
  }
}
