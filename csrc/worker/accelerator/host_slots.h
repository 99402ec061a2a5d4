// Registered host memory through which bytes reach the device that lie elsewhere: in a message, or
// in memory that is not registered. The copies go through the compute lane, in order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "memory/shared_memory.h"
#include "worker/accelerator/accelerator.h"

namespace shoal::worker {

class HostSlots {
 public:
  static constexpr uint64_t kSlotBytes = uint64_t{4} << 20;
  static constexpr size_t kSlots = 4;

  explicit HostSlots(Accelerator& device);
  ~HostSlots();

  // Copies to the device's memory in the compute lane. `from` may go when this returns. Waits only
  // if all slots are on their way.
  void copyIn(void* device_data, const void* from, uint64_t bytes);

 private:
  std::byte* take(uint64_t bytes);

  Accelerator& device_;
  memory::SharedMemory memory_;
  std::array<Ticket, kSlots> used_until_{};
  size_t slot_ = 0;           // that is being filled
  uint64_t taken_bytes_ = 0;  // of it
};

}  // namespace shoal::worker
