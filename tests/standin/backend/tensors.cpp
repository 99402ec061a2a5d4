#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>

#include "../driver/standin.h"
#include "backend.h"

namespace standin {

at::Tensor Aliases::of(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  const void* id = storage.unsafeGetStorageImpl();
  const c10::Storage* found = nullptr;
  for (const auto& [known, made] : storages_) {
    if (known == id) found = &made;
  }
  if (found == nullptr) {
    void* data = storage.data() == nullptr ? nullptr : aliasOf(storage.data());
    storages_.emplace_back(id, c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                                            c10::DataPtr(data, c10::kCPU)));
    found = &storages_.back().second;
  }
  const auto key = c10::computeDispatchKey(tensor.scalar_type(), c10::kStrided, c10::kCPU);
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(*found), c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  impl->_set_conj(tensor.is_conj());
  impl->_set_neg(tensor.is_neg());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return alias;
}

Access accessOf(const at::Tensor& tensor, bool writes) {
  if (tensor.numel() == 0 || tensor.storage().data() == nullptr) return {0, 0, writes};
  int64_t first = tensor.storage_offset();
  int64_t last = first;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    const int64_t reach = (tensor.size(i) - 1) * tensor.stride(i);
    (reach < 0 ? first : last) += reach;
  }
  const auto item = static_cast<int64_t>(tensor.itemsize());
  return {reinterpret_cast<uint64_t>(tensor.storage().data()) + static_cast<uint64_t>(first * item),
          static_cast<uint64_t>((last - first + 1) * item), writes};
}

at::Tensor emptyLike(const c10::IntArrayRef sizes, const c10::IntArrayRef strides,
                     at::ScalarType dtype, c10::Device device) {
  const c10::DeviceGuard guard(device);
  const auto key = c10::computeDispatchKey(dtype, c10::kStrided, device);
  return at::Tensor(at::detail::empty_strided_generic(sizes, strides, deviceAllocator(),
                                                      c10::DispatchKeySet(key), dtype));
}

void reshapeOutput(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const auto bytes = static_cast<size_t>(at::detail::computeStorageNbytes(
      sizes, strides, tensor.itemsize(), static_cast<size_t>(tensor.storage_offset())));
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) {
    const c10::DeviceGuard guard(tensor.device());
    storage->set_data_ptr_noswap(deviceAllocator()->allocate(bytes));
    storage->set_nbytes(bytes);
  }
  impl->set_sizes_and_strides(sizes, strides, tensor.storage_offset());
}

}  // namespace standin
