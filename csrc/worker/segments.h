// The worker's page table: which memory of this device is behind an address of the client.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "wire/address.h"
#include "wire/message.h"

namespace shoal::worker {

// Why a call failed. Shared by every result that the call was to make.
struct Failure {
  wire::ErrorKind kind;
  uint64_t sequence;  // number of the call in the stream
  std::string operator_name;
  std::string text;
};

struct Segment {
  c10::Storage storage;
  uint64_t bytes = 0;
  bool bound = false;
  std::shared_ptr<const Failure> poison;  // set where the call that makes it failed
};

// A place inside a segment, checked.
struct Place {
  Segment* segment;
  uint64_t offset;  // bytes
};

class Segments {
 public:
  explicit Segments(uint32_t session) : session_(session) {}

  // Binds `address` (the start of a segment) to memory, in place of what was there before.
  void bind(wire::Address address, c10::Storage storage, uint64_t bytes);
  void poison(wire::Address address, std::shared_ptr<const Failure> failure);
  void release(wire::Address address);
  // The segment that holds [address, address + bytes). Throws wire::ProtocolError if there is none.
  Place resolve(wire::Address address, uint64_t bytes);

  uint64_t boundBytes() const { return bound_bytes_; }
  size_t count() const { return count_; }

 private:
  Segment& at(wire::Address address, uint64_t bytes);

  struct Slot {
    std::unique_ptr<Segment> segment;
    uint32_t back = 0;  // slots back to where the segment starts
  };

  uint32_t session_;
  std::vector<Slot> slots_;
  uint64_t bound_bytes_ = 0;
  size_t count_ = 0;
};

}  // namespace shoal::worker
