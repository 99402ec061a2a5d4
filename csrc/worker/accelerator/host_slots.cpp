#include "worker/accelerator/host_slots.h"

#include <algorithm>

#include "memory/copy_bytes.h"

namespace shoal::worker {
namespace {

constexpr uint64_t kAlignment = 64;

}  // namespace

HostSlots::HostSlots(Accelerator& device)
    : device_(device), memory_(memory::SharedMemory::create("shoal-slots", kSlots * kSlotBytes)) {
  device_.registerHost(memory_.data(), memory_.bytes());
}

HostSlots::~HostSlots() {
  device_.unregisterHost(memory_.data());
}

std::byte* HostSlots::take(uint64_t bytes) {
  if (taken_bytes_ + bytes > kSlotBytes) {
    used_until_[slot_] = device_.mark(Lane::kCompute);
    slot_ = (slot_ + 1) % kSlots;
    device_.wait(used_until_[slot_]);
    taken_bytes_ = 0;
  }
  std::byte* const data = memory_.data() + slot_ * kSlotBytes + taken_bytes_;
  taken_bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return data;
}

void HostSlots::copyIn(void* device_data, const void* from, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes;) {
    const uint64_t piece = std::min(bytes - at, kSlotBytes);
    std::byte* const slot = take(piece);
    memory::copyBytes(slot, static_cast<const std::byte*>(from) + at, piece);
    device_.copyIn(Lane::kCompute, static_cast<std::byte*>(device_data) + at, slot, piece);
    at += piece;
  }
}

}  // namespace shoal::worker
