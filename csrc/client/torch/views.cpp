// Operators that change only a tensor's description: factories without values, views, resizing.
// They send nothing; the worker learns of a segment when a call uses it.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "client/call/output_shapes.h"
#include "client/space/devices.h"
#include "client/tensor/shape_inference.h"
#include "client/tensor/sharded_tensor.h"
#include "client/tensor/tensor.h"
#include "client/torch/kernels.h"

namespace shoal::client {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

class OnDevice {  // torch's allocator interface has no device argument: it follows the current one
 public:
  explicit OnDevice(std::optional<c10::Device> device) : before_(Devices::current()) {
    if (device.has_value() && device->has_index()) Devices::setCurrent(device->index());
  }
  ~OnDevice() { Devices::setCurrent(before_); }

 private:
  c10::DeviceIndex before_;
};

void checkFactory(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK_NOT_IMPLEMENTED(c10::layout_or_default(layout) == c10::kStrided,
                              "shoal devices hold strided tensors only, not ",
                              c10::layout_or_default(layout));
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory),
              "only CPU tensors can be pinned; leave out pin_memory, or leave out the device");
}

// A program that asked torch for deterministic algorithms gets memory with known values.
bool wantsKnownValues() {
  const at::Context& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory() &&
         !ShapeInference::active();
}

at::Tensor filled(at::Tensor tensor) {
  if (wantsKnownValues()) at::native::fill_empty_deterministic_(tensor);
  return tensor;
}

at::Tensor empty(at::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                 std::optional<bool> pin_memory, std::optional<c10::MemoryFormat> format) {
  checkFactory(layout, pin_memory);
  const OnDevice here(device);
  const RowHint rows(size, c10::dtype_or_default(dtype));
  return filled(
      at::detail::empty_generic(size, allocator(), kKeys, c10::dtype_or_default(dtype), format));
}

at::Tensor emptyStrided(at::IntArrayRef size, at::IntArrayRef stride,
                        std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                        std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  checkFactory(layout, pin_memory);
  const OnDevice here(device);
  const RowHint rows(size, stride, c10::dtype_or_default(dtype));
  return filled(at::detail::empty_strided_generic(size, stride, allocator(), kKeys,
                                                  c10::dtype_or_default(dtype)));
}

void growFor(c10::TensorImpl* impl, uint64_t bytes) {
  if (impl->unsafe_storage().nbytes() < bytes) resizeStorage(impl->unsafe_storage(), bytes);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size,
                          std::optional<c10::MemoryFormat> format) {
  if (self.sizes() == size && !format.has_value()) return self;
  auto* impl = self.unsafeGetTensorImpl();
  int64_t elements = 1;
  for (const int64_t n : size) {
    TORCH_CHECK(n >= 0, "Trying to create tensor with negative dimension ", n, ": ", size);
    TORCH_CHECK(!__builtin_mul_overflow(elements, n, &elements), "resize_: the size overflows");
  }
  const auto before = static_cast<int64_t>(impl->unsafe_storage().nbytes());
  growFor(impl, static_cast<uint64_t>(elements + self.storage_offset()) * self.itemsize());
  impl->set_sizes_contiguous(size);
  if (format.has_value()) impl->empty_tensor_restride(*format);
  if (wantsKnownValues()) at::native::fill_resize_deterministic_(self, before);
  return self;
}

at::Tensor& setStorageAll(at::Tensor& self, c10::Storage source, int64_t offset,
                          at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  TORCH_CHECK(source.device() == self.device(), "set_: the storage is on ", source.device(),
              ", the tensor on ", self.device());
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data() != nullptr && stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  }
  const auto span = static_cast<uint64_t>(at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.itemsize(), static_cast<size_t>(offset)));
  growFor(impl, span);
  return self;
}

at::Tensor& setStorage(at::Tensor& self, c10::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return setStorageAll(self, std::move(source), 0, {elements}, {});
}

at::Tensor& setTensor(at::Tensor& self, const at::Tensor& source) {
  return setStorageAll(self, source.storage(), source.storage_offset(), source.sizes(),
                       source.strides());
}

at::Tensor& setEmpty(at::Tensor& self) {
  return setStorageAll(self, makeStorage(0, 0, self.device()), 0, {0}, {});
}

bool isSetTo(const at::Tensor& self, const at::Tensor& other) {
  return self.storage().is_alias_of(other.storage()) &&
         self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
         self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
         self.strides() == other.strides();
}

// Forward-mode AD asks for zeros that need no memory; ours are ordinary ones.
at::Tensor zerosForTangents(at::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                            std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                            std::optional<bool> pin_memory) {
  return at::zeros(size, dtype, layout, device, pin_memory);
}

// `module.to("shoal")` keeps its Parameters (tied weights stay tied, an optimizer made before stays
// right) only if torch may exchange a CPU tensor's insides for a device tensor's. Both are plain
// dense tensors, but torch's own list of such backends leaves out new ones.
bool compatibleInsides(const at::Tensor& self, const at::Tensor& from) {
  const auto dense = [](const at::Tensor& t) {
    return t.layout() == c10::kStrided && !t.is_quantized() && !t.is_nested() &&
           (t.device().is_cpu() || t.device().is_privateuseone());
  };
  return (dense(self) && dense(from)) ||
         self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

// All streams of a device share its op stream, in which frees follow uses.
void recordStream(at::Tensor&, c10::Stream) {}

}  // namespace

void registerViews(torch::Library& m, torch::Library& autograd) {
  autograd.impl("_has_compatible_shallow_copy_type", compatibleInsides);
  m.impl("record_stream", recordStream);
  m.impl("_has_compatible_shallow_copy_type", compatibleInsides);
  m.impl("_efficientzerotensor", zerosForTangents);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", emptyStrided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", setStorageAll);
  m.impl("set_.source_Storage", setStorage);
  m.impl("set_.source_Tensor", setTensor);
  m.impl("set_", setEmpty);
  m.impl("is_set_to", isSetTo);
}

}  // namespace shoal::client
