#include "client/tensor/tensor.h"

#include <c10/core/TensorImpl.h>

#include <algorithm>

#include "client/space/devices.h"
#include "client/space/session_report.h"
#include "client/space/transfers.h"
#include "client/tensor/shape_inference.h"
#include "client/tensor/sharded_tensor.h"

namespace shoal::client {
namespace {

void releaseAddress(void* context) {
  const auto address = reinterpret_cast<wire::Address>(context);
  if (address == 0) return;
  Session* session = Devices::get().byNumber(wire::sessionOf(address));
  if (session != nullptr) session->release(address);
}

c10::DataPtr makePointer(wire::Address address, c10::Device device) {
  void* data = reinterpret_cast<void*>(address);
  return {data, data, &releaseAddress, device};
}

wire::Address mintFor(Session& session, uint64_t bytes, c10::DeviceIndex index) {
  if (bytes <= session.wholeBytesMax() || WholeSegments::wanted()) {
    return session.mint(bytes, index);
  }
  return mintSharded(session, bytes, RowHint::bytes(), index);
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::DeviceType::PrivateUse1, Devices::current());
    if (bytes == 0 || ShapeInference::active()) return makePointer(0, device);
    return makePointer(mintFor(Devices::get().sessionWith(device.index()), bytes, device.index()),
                       device);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &releaseAddress; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    const auto target = reinterpret_cast<wire::Address>(to);
    copyAcross(Devices::get().owner(target), target, 0, reinterpret_cast<wire::Address>(from), 0,
               bytes);
  }

  bool initialized() override { return Devices::get().attached(); }
  void emptyCache(c10::MempoolId_t) override {
    if (Devices::get().attached()) Devices::get().session().trim();
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {
    // Frees travel in the stream behind the uses: nothing to record.
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override;
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    Session& session = Devices::get().sessionWith(index);
    session.directory(session.lock()).memory().resetPeak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    const MemoryUse use = memoryUse(Devices::get().sessionWith(index), index);
    const uint64_t used = std::min(use.allocated_bytes, use.memory_bytes);
    return {use.memory_bytes - used, use.memory_bytes};
  }
};

c10::CachingDeviceAllocator::DeviceStats Allocator::getDeviceStats(c10::DeviceIndex index) {
  Session& session = Devices::get().sessionWith(index);
  const MemoryUse use = memoryUse(session, index);
  const auto worker = session.deviceMember(index).ask(wire::Stats{});
  c10::CachingDeviceAllocator::DeviceStats stats;
  const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto set = [all](c10::CachingAllocator::StatArray& stat, uint64_t now, uint64_t peak) {
    stat[all].current = static_cast<int64_t>(now);
    stat[all].peak = static_cast<int64_t>(peak);
  };
  set(stats.allocated_bytes, use.allocated_bytes, use.peak_bytes);
  set(stats.requested_bytes, use.allocated_bytes, use.peak_bytes);
  set(stats.active_bytes, use.allocated_bytes, use.peak_bytes);
  set(stats.allocation, use.allocations - use.frees, use.allocations);
  set(stats.active, use.allocations - use.frees, use.allocations);
  const uint64_t reserved = std::max(worker.reserved_bytes, use.allocated_bytes);
  set(stats.reserved_bytes, reserved, std::max(reserved, use.peak_bytes));
  stats.allocated_bytes[all].allocated = static_cast<int64_t>(use.peak_bytes);
  return stats;
}

Allocator g_allocator;

}  // namespace

c10::DeviceAllocator* allocator() {
  return &g_allocator;
}

Session& sessionOf(const at::Tensor& tensor) {
  const wire::Address base = baseOf(tensor);
  return base == 0 ? Devices::get().sessionWith(tensor.device().index())
                   : Devices::get().owner(base);
}

c10::Storage makeStorage(wire::Address address, uint64_t bytes, c10::Device device) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, makePointer(address, device), &g_allocator,
      /*resizable=*/true));
}

at::Tensor makeTensor(wire::Address address, const OutputMeta& meta, c10::Device device) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      makeStorage(address, meta.bytes, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::scalarTypeToTypeMeta(meta.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes, meta.strides);
  return tensor;
}

at::Tensor makeView(wire::Address address, uint64_t bytes, c10::ScalarType dtype,
                    at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  const c10::Device device(c10::DeviceType::PrivateUse1, 0);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      makeStorage(address, bytes, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

void resizeStorage(const c10::Storage& storage, uint64_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  const auto old = reinterpret_cast<wire::Address>(impl->mutable_data());
  const uint64_t keep = std::min<uint64_t>(impl->nbytes(), bytes);
  const c10::Device device = impl->device();
  wire::Address address = 0;
  if (bytes > 0 && !ShapeInference::active()) {
    Session& session =
        old != 0 ? Devices::get().owner(old) : Devices::get().sessionWith(device.index());
    address = mintFor(session, bytes, device.index());
    if (old != 0 && keep > 0) copyAcross(session, address, 0, old, 0, keep);
  }
  impl->set_data_ptr_noswap(makePointer(address, device));
  impl->set_nbytes(bytes);
}

}  // namespace shoal::client
