#include "client/sharded/sharded_tensor.h"

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>

#include "client/member/devices.h"
#include "client/replay/recording.h"
#include "client/torch/tensor.h"

namespace shoal::client {

using wire::Address;

namespace {

std::atomic<int64_t> g_wide_segments{0};

constexpr uint64_t kRowsTogether = 16;  // torch's CPU generators draw in groups of 16
constexpr uint64_t kPieceAlignment = 64;
constexpr uint64_t kPageBytes = uint64_t{2} << 20;

// Where a segment is cut: at rows, or, if a row is larger than an extent, inside of each row.
std::vector<uint64_t> cutSegment(uint64_t bytes, uint64_t row_bytes, uint64_t extent_bytes) {
  std::vector<uint64_t> cuts;
  if (row_bytes == 0) row_bytes = std::min(kPageBytes, extent_bytes);
  if (row_bytes <= extent_bytes) {
    uint64_t rows = extent_bytes / row_bytes;
    if (rows >= kRowsTogether) rows -= rows % kRowsTogether;
    for (uint64_t cut = rows * row_bytes; cut < bytes; cut += rows * row_bytes) cuts.push_back(cut);
    return cuts;
  }
  const uint64_t pieces = (row_bytes - 1) / extent_bytes + 1;
  const uint64_t piece = ((row_bytes / pieces) / kPieceAlignment + 1) * kPieceAlignment;
  for (uint64_t row = 0; row < bytes; row += row_bytes) {
    for (uint64_t cut = row; cut < std::min(bytes, row + row_bytes); cut += piece) {
      if (cut > 0) cuts.push_back(cut);
    }
  }
  return cuts;
}

}  // namespace

bool anyWide() {
  return g_wide_segments.load(std::memory_order_relaxed) > 0;
}

// --- segments

Address Session::mintWide(uint64_t bytes, uint64_t row_bytes, c10::DeviceIndex index) {
  const Lock held = lock();
  checkRoom(bytes, index, held);
  std::vector<uint64_t> cuts = cutSegment(bytes, row_bytes, extentBytes());
  cuts.push_back(bytes);
  Extents extents;
  uint64_t start = 0;
  for (const uint64_t cut : cuts) {
    extents.push_back({mint(cut - start, index, held), start, cut - start});
    start = cut;
  }
  return bindWide(std::move(extents), index, held);
}

Address Session::joinWide(const std::vector<Address>& bases, c10::DeviceIndex index) {
  const Lock held = lock();
  Extents extents;
  uint64_t start = 0;
  for (const Address base : bases) {
    const uint64_t bytes = at(base).bytes;
    extents.push_back({base, start, bytes});
    start += bytes;
  }
  return bindWide(std::move(extents), index, held);
}

Address Session::bindWide(Extents extents, c10::DeviceIndex index, const Lock&) {
  Recording::giveUp("a tensor is larger than any device");
  const uint64_t bytes = extents.back().start + extents.back().bytes;
  const uint32_t slot = takeSlots(wire::slotsFor(bytes));
  Segment& segment = segments_[slot];
  segment = Segment();  // stays without life of its own: its extents are what is placed and counted
  segment.bytes = bytes;
  segment.pinned = static_cast<int8_t>(index - 1);
  const Address base = wire::makeAddress(number_, slot);
  for (const Extent& extent : extents) at(extent.base).part_of = base;
  wide_[slot] = std::make_unique<Extents>(std::move(extents));
  g_wide_segments.fetch_add(1, std::memory_order_relaxed);
  return base;
}

Extents Session::splitWide(Address base) {
  const Lock held = lock();
  const uint32_t slot = wire::slotOf(base);
  Extents extents = std::move(*wide_.at(slot));
  for (const Extent& extent : extents) at(extent.base).part_of = 0;
  wide_.erase(slot);
  giveSlots(slot, wire::slotsFor(segments_[slot].bytes));
  segments_[slot] = Segment();
  g_wide_segments.fetch_sub(1, std::memory_order_relaxed);
  return extents;
}

void Session::releaseWide(Address base, const Lock& held) noexcept {
  const uint32_t slot = wire::slotOf(base);
  const auto extents = std::move(wide_.at(slot));
  wide_.erase(slot);
  giveSlots(slot, wire::slotsFor(segments_[slot].bytes));
  segments_[slot] = Segment();
  g_wide_segments.fetch_sub(1, std::memory_order_relaxed);
  for (const Extent& extent : *extents) releaseLocked(extent.base, held);
}

const Extents* Session::extents(Address base, const Lock&) const {
  if (wide_.empty()) return nullptr;
  const auto found = wide_.find(wire::slotOf(base));
  return found == wide_.end() ? nullptr : found->second.get();
}

// --- tensors

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
  return session == nullptr ? nullptr : session->extents(base);
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
  if (session.extents(base) != nullptr) {
    for (const Extent& extent : session.splitWide(base)) bases.push_back(extent.base);
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
  return makeTensor(session.joinWide(bases, device.index()), meta, device);
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
