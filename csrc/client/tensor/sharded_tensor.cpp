#include "client/tensor/sharded_tensor.h"

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "client/space/devices.h"
#include "client/tensor/tensor.h"

namespace shoal::client {

using wire::Address;

thread_local uint64_t RowHint::bytes_ = 0;
thread_local int WholeSegments::depth_ = 0;

RowHint::RowHint(at::IntArrayRef sizes, c10::ScalarType dtype) {
  size_t dim = 0;
  while (dim < sizes.size() && sizes[dim] <= 1) ++dim;
  uint64_t row = c10::elementSize(dtype);
  for (size_t i = dim + 1; i < sizes.size(); ++i) row *= static_cast<uint64_t>(sizes[i]);
  bytes_ = row;
}

RowHint::RowHint(at::IntArrayRef sizes, at::IntArrayRef strides, c10::ScalarType dtype) {
  int64_t largest = 1;
  for (size_t i = 0; i < sizes.size() && i < strides.size(); ++i) {
    if (sizes[i] > 1) largest = std::max(largest, strides[i]);
  }
  bytes_ = static_cast<uint64_t>(largest) * c10::elementSize(dtype);
}

const Extents* extentsOf(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_privateuseone() || !tensor.has_storage()) {
    return nullptr;
  }
  const Address base = baseOf(tensor);
  if (base == 0) return nullptr;
  Session* session = Devices::get().byNumber(wire::sessionOf(base));
  return session == nullptr ? nullptr : extentsOf(*session, base);
}

Span spanOf(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto item = static_cast<uint64_t>(tensor.itemsize());
  const auto start = static_cast<uint64_t>(tensor.storage_offset()) * item;
  return {start, start + static_cast<uint64_t>(last) * item + item};
}

at::Tensor withinExtent(const at::Tensor& tensor, const Extents& extents) {
  const Span span = tensor.numel() == 0 ? Span{0, 1} : spanOf(tensor);
  auto after = std::upper_bound(extents.begin(), extents.end(), span.start,
                                [](uint64_t at, const Extent& e) { return at < e.start; });
  const Extent& extent = *--after;
  if (span.end > extent.start + extent.bytes) return {};
  // The extent lives as long as the wide segment does, so the alias keeps that alive.
  auto* owner = new c10::Storage(tensor.storage());
  const auto forget = [](void* context) { delete static_cast<c10::Storage*>(context); };
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), extent.bytes,
      c10::DataPtr(reinterpret_cast<void*>(extent.base), owner, forget, tensor.device()),
      allocator(), /*resizable=*/false));
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), tensor.dtype());
  const uint64_t offset = tensor.numel() == 0 ? 0 : span.start - extent.start;
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                              static_cast<int64_t>(offset / tensor.itemsize()));
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

bool crossesExtents(const at::Tensor& tensor) {
  const Extents* extents = extentsOf(tensor);
  if (extents == nullptr || tensor.numel() == 0) return false;
  const Span span = spanOf(tensor);
  return std::any_of(extents->begin(), extents->end(), [span](const Extent& e) {
    return e.start > span.start && e.start < span.end;
  });
}

void addCuts(const at::Tensor& tensor, int64_t dim, std::vector<int64_t>& cuts) {
  const Extents* extents = extentsOf(tensor);
  const int64_t size = tensor.size(dim);
  const uint64_t step = static_cast<uint64_t>(tensor.stride(dim)) * tensor.itemsize();
  if (extents == nullptr || size < 2 || step == 0) return;
  const Span span = spanOf(tensor);
  for (const Extent& extent : *extents) {
    if (extent.start <= span.start || extent.start >= span.end) continue;
    const uint64_t behind = extent.start - span.start;
    const auto index = static_cast<int64_t>(behind / step);
    if (index > 0 && index < size) cuts.push_back(index);
    if (behind % step != 0 && index + 1 < size) cuts.push_back(index + 1);
  }
}

int64_t majorDim(const at::Tensor& tensor) {
  int64_t major = -1;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1 && (major < 0 || tensor.stride(i) > tensor.stride(major))) major = i;
  }
  return major;
}

namespace {

// The segments behind a block that nobody else holds; empty if it has to be copied.
std::vector<Address> takeSegments(const at::Tensor& block, Session& session) {
  auto* storage = block.storage().unsafeGetStorageImpl();
  const bool alone = block.storage().use_count() == 1 && block.storage_offset() == 0 &&
                     storage->nbytes() == block.nbytes() && block.is_contiguous();
  const Address base = baseOf(block);
  if (!alone || base == 0 || WholeSegments::wanted()) return {};
  if (storage->data_ptr().get_deleter() != allocator()->raw_deleter()) return {};  // an alias
  std::vector<Address> bases;
  if (extentsOf(session, base) != nullptr) {
    for (const Extent& extent : splitSharded(session, base, session.lock()))
      bases.push_back(extent.base);
  } else {
    bases.push_back(base);
  }
  storage->_mutable_data_ptr_no_checks().release_context();
  storage->set_nbytes(0);
  return bases;
}

at::Tensor joinInPlace(std::vector<at::Tensor>& blocks, at::IntArrayRef sizes) {
  Session& session = sessionOf(blocks[0]);
  const c10::Device device = blocks[0].device();
  OutputMeta meta;
  meta.dtype = blocks[0].scalar_type();
  meta.sizes.assign(sizes.begin(), sizes.end());
  meta.bytes = c10::elementSize(meta.dtype);
  meta.strides.resize(sizes.size());
  for (size_t i = sizes.size(); i-- > 0;) {
    meta.strides[i] = static_cast<int64_t>(meta.bytes / c10::elementSize(meta.dtype));
    meta.bytes *= static_cast<uint64_t>(sizes[i]);
  }
  std::vector<Address> bases;
  for (at::Tensor& block : blocks) {
    std::vector<Address> taken = takeSegments(block, session);
    if (taken.empty()) {
      const at::Tensor copy = block.clone(at::MemoryFormat::Contiguous);
      taken = takeSegments(copy, session);
    }
    TORCH_INTERNAL_ASSERT(!taken.empty());
    bases.insert(bases.end(), taken.begin(), taken.end());
    block.reset();
  }
  return makeTensor(joinSharded(session, bases, device.index()), meta, device);
}

}  // namespace

at::Tensor joinBlocks(std::vector<at::Tensor> made, int64_t dim) {
  std::vector<at::Tensor> blocks;
  for (at::Tensor& block : made) {
    if (block.size(dim) > 0) blocks.push_back(std::move(block));
  }
  if (blocks.size() < 2) return blocks.empty() ? made[0] : blocks[0];
  auto sizes = blocks[0].sizes().vec();
  sizes[static_cast<size_t>(dim)] = 0;
  uint64_t bytes = 0;
  for (const at::Tensor& block : blocks) {
    sizes[static_cast<size_t>(dim)] += block.size(dim);
    bytes += block.nbytes();
  }
  Session& session = sessionOf(blocks[0]);
  if (bytes <= session.wholeBytesMax() || WholeSegments::wanted()) return at::cat(blocks, dim);
  const bool outermost =
      std::all_of(sizes.begin(), sizes.begin() + dim, [](int64_t n) { return n == 1; });
  const bool nonempty =
      std::all_of(blocks.begin(), blocks.end(), [](const at::Tensor& b) { return b.numel() > 0; });
  if (outermost && nonempty) return joinInPlace(blocks, sizes);
  at::Tensor whole = at::empty(sizes, blocks[0].options());
  int64_t at = 0;
  for (const at::Tensor& block : blocks) {
    whole.narrow(dim, at, block.size(dim)).copy_(block);
    at += block.size(dim);
  }
  return whole;
}

}  // namespace shoal::client
