// What a message may do with the session's memory: allocate, use a checked range, and poison what a
// failed copy leaves.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>

#include "memory/shared_memory.h"
#include "transport/ring.h"
#include "wire/address.h"
#include "worker/accelerator/late.h"
#include "worker/failure/failure.h"
#include "worker/paging/segments.h"

namespace shoal::worker {

class SessionMemory {
 public:
  // `host` is the region that the client allocates pinned memory and staging blocks from. The lease
  // grants `limit_bytes`. `late` is null where the device does not run late.
  SessionMemory(Accelerator& device, Late* late, const memory::SharedMemory& host,
                Segments& segments, uint64_t limit_bytes)
      : device_(device), late_(late), host_(host), segments_(segments), limit_bytes_(limit_bytes) {
    if (late_ != nullptr) late_->registered.add(host.data(), host.bytes());
  }

  Accelerator& device() const { return device_; }
  bool runsLate() const { return late_ != nullptr; }
  const memory::SharedMemory& host() const { return host_; }
  Segments& segments() const { return segments_; }
  uint64_t limitBytes() const { return limit_bytes_; }

  // Binds new memory to `address`. Poisons it if there is none.
  void allocate(wire::Address address, uint64_t bytes, uint64_t sequence, const char* what);
  // Throws c10::OutOfMemoryError unless the lease has room for so much more, swap space included.
  void requireRoom(uint64_t bytes, const char* verb) const;
  // Throws wire::ProtocolError if the range is not in the host region.
  std::byte* hostRange(uint64_t offset, uint64_t bytes) const;
  struct Range {
    std::byte* data;
    c10::Storage pin;  // while it is held, the memory stays
  };
  // Brings the range into the device's memory. Throws PoisonedError if there is nothing to use.
  Range range(wire::Address address, uint64_t bytes, bool writes) const;

  // Copies to the range, or to memory behind it. `from` may go when this returns.
  void put(wire::Address address, const void* from, uint64_t bytes) const {
    put(range(address, bytes, true).data, from, bytes);
  }
  void put(std::byte* to, const void* from, uint64_t bytes) const;
  // Copies between the range and the client's region, beside operators. The client keeps that
  // memory until the message is done.
  void copyIn(wire::Address address, const std::byte* host, uint64_t bytes) const;
  void copyOut(std::byte* host, wire::Address address, uint64_t bytes) const;
  // The range's bytes, when the message is done and until its reply is sent.
  std::span<const std::byte> read(wire::Address address, uint64_t bytes) const;

  // Runs `copy`, which writes to [to, + bytes) for message `sequence`. Poisons the target if it
  // fails: some of its bytes may be there, and the stream does not want the old ones.
  template <typename Copy>
  void copyInto(wire::Address to, uint64_t bytes, uint64_t sequence, const Copy& copy) const {
    segments_.resolve(to, bytes);  // an invalid message changes nothing
    try {
      copy();
    } catch (const transport::PeerLost&) {
      throw;  // the client is gone
    } catch (...) {
      segments_.poisonAt(to, describe(std::current_exception(), sequence, "a copy"));
      throw;
    }
  }

 private:
  Range rangeOf(const Place& place) const;

  Accelerator& device_;
  Late* late_;
  const memory::SharedMemory& host_;
  Segments& segments_;
  uint64_t limit_bytes_;
};

}  // namespace shoal::worker
