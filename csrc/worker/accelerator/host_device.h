// A CPU device: its memory is host memory, and its only lane is the program's order.
#pragma once

#include "worker/accelerator/accelerator.h"

namespace shoal::worker {

class HostDevice final : public Accelerator {
 public:
  c10::Device device() const override { return c10::Device(c10::DeviceType::CPU); }
  bool runsLate() const override { return false; }
  c10::Storage allocate(uint64_t bytes) override;
  void emptyCache() override {}
  void copyIn(Lane lane, void* device_data, const void* host, uint64_t bytes) override;
  void copyOut(Lane lane, void* host, const void* device_data, uint64_t bytes) override;
  void copyWithin(void* to, const void* from, uint64_t bytes) override;
  Ticket mark(Lane) override { return {}; }
  void after(Lane, Ticket) override {}
  bool isPast(Ticket) override { return true; }
  void wait(Ticket) override {}
  bool registerHost(std::byte*, uint64_t) override { return true; }
  void unregisterHost(std::byte*) override {}
  Held held() const override { return {0, 0}; }  // the arena counts
};

}  // namespace shoal::worker
