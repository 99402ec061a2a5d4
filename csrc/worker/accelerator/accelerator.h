// The device of a session: its memory, and the lanes in which it works. A CPU device does at once
// what it is told. An accelerator does it later: a call returns when the work is issued, and
// tickets say what is done.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace shoal::worker {

// An order of work. Operators run in kCompute. Large copies have lanes of their own, so that they
// run beside operators.
enum class Lane : uint8_t { kCompute, kIn, kOut };
inline constexpr size_t kLanes = 3;

// A point in a lane: all that was issued there before it. Number 0 is always past.
struct Ticket {
  Lane lane = Lane::kCompute;
  uint64_t number = 0;
};

class Accelerator {
 public:
  Accelerator() = default;
  Accelerator(const Accelerator&) = delete;
  virtual ~Accelerator() = default;

  virtual c10::Device device() const = 0;
  // Whether work is done later than it is issued. If not, every ticket is past.
  virtual bool runsLate() const = 0;
  // Memory that the compute lane may use at once.
  virtual c10::Storage allocate(uint64_t bytes) = 0;
  virtual void emptyCache() = 0;

  // Copies of bytes, in the lane's order. They return at once if the host's memory is registered.
  // Else they return when that memory may be used again.
  virtual void copyIn(Lane lane, void* device_data, const void* host, uint64_t bytes) = 0;
  virtual void copyOut(Lane lane, void* host, const void* device_data, uint64_t bytes) = 0;
  virtual void copyWithin(void* to, const void* from, uint64_t bytes) = 0;  // in the compute lane

  virtual Ticket mark(Lane lane) = 0;
  // What `waits` does from now on comes after the ticket. The host does not wait.
  virtual void after(Lane waits, Ticket ticket) = 0;
  // Any thread may call these. They throw what the device reports.
  virtual bool isPast(Ticket ticket) = 0;
  virtual void wait(Ticket ticket) = 0;

  // Registers host memory, so that the device copies straight from and to it. Returns false if that
  // cannot be.
  virtual bool registerHost(std::byte* data, uint64_t bytes) = 0;
  virtual void unregisterHost(std::byte* data) = 0;

  struct Held {
    uint64_t used, reserved;  // bytes in use; those, and what torch keeps for later
  };
  virtual Held held() const = 0;
};

// Call it after startDevice(), on the thread that issues work.
std::unique_ptr<Accelerator> openDevice(c10::Device device);

}  // namespace shoal::worker
