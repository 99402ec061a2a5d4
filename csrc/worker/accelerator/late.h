// What the worker needs where the device runs late: order between lanes, and host memory that the
// device reaches by itself.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "memory/shared_memory.h"
#include "transport/progress.h"
#include "worker/accelerator/accelerator.h"
#include "worker/accelerator/host_slots.h"
#include "worker/accelerator/lanes.h"
#include "worker/accelerator/registered_memory.h"

namespace shoal::worker {

class Late {
 public:
  // `progress` is where done messages are published.
  Late(Accelerator& device, transport::Progress& progress);
  ~Late();

  // Message `message` is issued next.
  void begin(uint64_t message) {
    lanes.begin(message, progress_.done.load(std::memory_order_acquire));
  }
  // Copies between registered memory of the host, in a lane of their own, and a segment's memory.
  void copyIn(Uses& uses, std::byte* data, const std::byte* host, uint64_t bytes);
  void copyOut(Uses& uses, std::byte* host, const std::byte* data, uint64_t bytes);
  // Copies in the compute lane to memory that stays until the read is answered. Reads are answered
  // in order, by another thread.
  std::span<const std::byte> read(const std::byte* data, uint64_t bytes);
  void readAnswered();

  Lanes lanes;
  RegisteredMemory registered;
  HostSlots slots;

 private:
  static constexpr uint64_t kReads = 256;  // that wait for their replies at once

  Accelerator& device_;
  transport::Progress& progress_;
  memory::SharedMemory reads_;
  uint64_t asked_ = 0;                 // reads so far
  std::atomic<uint64_t> answered_{0};  // of them
};

}  // namespace shoal::worker
