// An accelerator by torch's device-neutral calls: lanes are streams, tickets are events. Only
// registering host memory needs the driver.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <array>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "worker/accelerator/accelerator.h"

namespace shoal::worker {

class TorchDevice final : public Accelerator {
 public:
  // The calling thread's current stream becomes the compute lane.
  explicit TorchDevice(c10::Device device);

  c10::Device device() const override { return device_; }
  bool runsLate() const override { return true; }
  c10::Storage allocate(uint64_t bytes) override;
  void emptyCache() override;
  void copyIn(Lane lane, void* device_data, const void* host, uint64_t bytes) override;
  void copyOut(Lane lane, void* host, const void* device_data, uint64_t bytes) override;
  void copyWithin(void* to, const void* from, uint64_t bytes) override;
  Ticket mark(Lane lane) override;
  void after(Lane waits, Ticket ticket) override;
  bool isPast(Ticket ticket) override;
  void wait(Ticket ticket) override;
  bool registerHost(std::byte* data, uint64_t bytes) override;
  void unregisterHost(std::byte* data) override;
  Held held() const override;

 private:
  using Event = std::shared_ptr<c10::Event>;
  struct Marks {  // of one lane; their numbers are consecutive
    std::deque<Event> events;
    uint64_t first = 1;  // number of events.front(); all before it are past
  };

  const c10::Stream& stream(Lane lane) const { return streams_[static_cast<size_t>(lane)]; }
  // CUDA waits by itself where host memory is not registered. Others might not.
  bool returnsAtOnce() const { return device_.is_cuda(); }
  Event find(Ticket ticket);
  void passed(Ticket ticket);

  c10::Device device_;
  std::vector<c10::Stream> streams_;  // by lane
  std::mutex mutex_;                  // guards all that follows
  std::array<Marks, kLanes> marks_;
  std::vector<Event> spare_;  // events are made once and used again
};

}  // namespace shoal::worker
