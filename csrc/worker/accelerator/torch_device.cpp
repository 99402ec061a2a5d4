#include "worker/accelerator/torch_device.h"

#include <ATen/Functions.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "worker/accelerator/cuda_driver.h"
#include "worker/accelerator/host_device.h"

namespace shoal::worker {
namespace {

at::Tensor blob(const void* data, uint64_t bytes, c10::Device device) {
  return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(bytes)},
                       at::TensorOptions().dtype(at::kByte).device(device));
}

}  // namespace

TorchDevice::TorchDevice(c10::Device device) : device_(device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  streams_ = {guard.getStream(device), guard.getNewStream(device), guard.getNewStream(device)};
}

c10::Storage TorchDevice::allocate(uint64_t bytes) {
  auto* allocator = c10::GetAllocator(device_.type());
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, allocator->allocate(bytes), allocator,
                      /*resizable=*/true);
}

void TorchDevice::emptyCache() {
  c10::getDeviceAllocator(device_.type())->emptyCache();
}

void TorchDevice::copyIn(Lane lane, void* device_data, const void* host, uint64_t bytes) {
  if (bytes == 0) return;
  const c10::StreamGuard guard(stream(lane));
  blob(device_data, bytes, device_).copy_(blob(host, bytes, at::kCPU), returnsAtOnce());
}

void TorchDevice::copyOut(Lane lane, void* host, const void* device_data, uint64_t bytes) {
  if (bytes == 0) return;
  const c10::StreamGuard guard(stream(lane));
  blob(host, bytes, at::kCPU).copy_(blob(device_data, bytes, device_), returnsAtOnce());
}

void TorchDevice::copyWithin(void* to, const void* from, uint64_t bytes) {
  if (bytes > 0) blob(to, bytes, device_).copy_(blob(from, bytes, device_));
}

Ticket TorchDevice::mark(Lane lane) {
  const std::lock_guard lock(mutex_);
  Event event;
  // A past event may still be in the hands of a thread that waits.
  if (!spare_.empty() && spare_.back().use_count() == 1) {
    event = std::move(spare_.back());
    spare_.pop_back();
  } else {
    event = std::make_shared<c10::Event>(device_.type(), c10::EventFlag::PYTORCH_DEFAULT);
  }
  event->record(stream(lane));
  Marks& marks = marks_[static_cast<size_t>(lane)];
  marks.events.push_back(std::move(event));
  return {lane, marks.first + marks.events.size() - 1};
}

// Null if the ticket is past.
TorchDevice::Event TorchDevice::find(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  const Marks& marks = marks_[static_cast<size_t>(ticket.lane)];
  return ticket.number < marks.first ? nullptr : marks.events.at(ticket.number - marks.first);
}

void TorchDevice::passed(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  Marks& marks = marks_[static_cast<size_t>(ticket.lane)];
  for (; marks.first <= ticket.number; ++marks.first) {
    spare_.push_back(std::move(marks.events.front()));
    marks.events.pop_front();
  }
}

void TorchDevice::after(Lane waits, Ticket ticket) {
  if (waits == ticket.lane) return;  // one lane is in order
  if (const Event event = find(ticket)) event->block(stream(waits));
}

bool TorchDevice::isPast(Ticket ticket) {
  const Event event = find(ticket);
  if (event != nullptr && !event->query()) return false;
  if (event != nullptr) passed(ticket);
  return true;
}

void TorchDevice::wait(Ticket ticket) {
  const Event event = find(ticket);
  if (event == nullptr) return;
  event->synchronize();
  passed(ticket);
}

bool TorchDevice::registerHost(std::byte* data, uint64_t bytes) {
  return device_.is_cuda() && cudaRegisterHost(data, bytes);
}

void TorchDevice::unregisterHost(std::byte* data) {
  cudaUnregisterHost(data);
}

Accelerator::Held TorchDevice::held() const {
  const auto stats = c10::getDeviceAllocator(device_.type())->getDeviceStats(device_.index());
  return {static_cast<uint64_t>(stats.allocated_bytes[0].current),
          static_cast<uint64_t>(stats.reserved_bytes[0].current)};
}

std::unique_ptr<Accelerator> openDevice(c10::Device device) {
  if (device.is_cpu()) return std::make_unique<HostDevice>();
  return std::make_unique<TorchDevice>(device);
}

}  // namespace shoal::worker
