// Tensors of the device: ordinary torch tensors whose storage "pointer" is a Shoal address.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "client/member/call_cache.h"
#include "client/space/session.h"
#include "wire/address.h"

namespace shoal::client {

inline wire::Address baseOf(const c10::TensorImpl& tensor) {
  return reinterpret_cast<wire::Address>(tensor.unsafe_storage().data());
}
inline wire::Address baseOf(const at::Tensor& tensor) {
  return baseOf(*tensor.unsafeGetTensorImpl());
}
// Address of the first element; 0 for a tensor without memory.
inline wire::Address addressOf(const at::Tensor& tensor) {
  const wire::Address base = baseOf(tensor);
  return base == 0 ? 0 : base + static_cast<uint64_t>(tensor.storage_offset()) * tensor.itemsize();
}

// The session that computes on this tensor. Raises DeviceLostError if it is over.
Session& sessionOf(const at::Tensor& tensor);

// A storage for an address that was minted for `bytes`; frees it in the end.
c10::Storage makeStorage(wire::Address address, uint64_t bytes, c10::Device device);
at::Tensor makeTensor(wire::Address address, const OutputMeta& meta, c10::Device device);
// A tensor of the whole lease on a segment of its own, laid out as given.
at::Tensor makeView(wire::Address address, uint64_t bytes, c10::ScalarType dtype,
                    at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset);

// Replaces a storage's memory by `bytes` at a new address, keeping the old bytes that fit.
void resizeStorage(const c10::Storage& storage, uint64_t bytes);

c10::DeviceAllocator* allocator();

}  // namespace shoal::client
