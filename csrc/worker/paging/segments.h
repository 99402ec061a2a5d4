// The worker's page table: which memory of this device is behind an address of the client.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "memory/shared_memory.h"
#include "transport/location_table.h"
#include "wire/address.h"
#include "wire/message.h"
#include "worker/paging/pager.h"
#include "worker/peers/peers.h"
#include "worker/shared/shared_block.h"

namespace shoal::worker {

// Why a call failed. Shared by every result that the call was to make.
struct Failure {
  wire::ErrorKind kind;
  uint64_t sequence;          // number of the call in the stream
  std::string operator_name;  // of kPeerLost: the name of the lost device
  std::string text;
};

// A device of the lease that reads a segment of ours until it has done its message `sequence`.
struct PeerRead {
  uint32_t peer;
  uint64_t sequence;
};

struct Segment {
  c10::Storage storage;
  uint64_t bytes = 0;
  bool bound = false;
  std::shared_ptr<const Failure> poison;  // set where the call that makes it failed
  Residency residency;                    // in the device's memory, or in swap space
  std::vector<PeerRead> readers;
  std::shared_ptr<SharedBlock> shared;  // set where other sessions have the memory too
};

// A place inside a segment, checked.
struct Place {
  Segment* segment;
  uint64_t offset;  // bytes
};

class Segments {
 public:
  explicit Segments(uint32_t session) : session_(session) {}

  // From now on `places` says where segments are. `host` and `arena` are the regions it counts in.
  void publish(transport::Places* places, const memory::SharedMemory* host,
               const memory::SharedMemory* arena) {
    places_ = places;
    host_ = host;
    arena_ = arena;
  }
  // Peers that may still read a segment. What they read must neither change nor go.
  void setPeers(const Peers* peers) { peers_ = peers; }
  // A peer will read the segment; message `exported` told us, and notes where it is.
  void addReader(wire::Address address, PeerRead reader, uint64_t exported);
  // Waits until nobody reads the segment any more.
  void awaitReaders(Segment& segment);
  // Lets go of freed memory that nobody reads any more; with `wait`, of all of it. True if there
  // was any.
  bool bury(bool wait);

  // Binds `address` (the start of a segment) to memory, in place of what was there before.
  void bind(wire::Address address, c10::Storage storage, uint64_t bytes);
  void poison(wire::Address address, std::shared_ptr<const Failure> failure);
  // The same for the segment that holds `address`, if there is one that is not poisoned already.
  void poisonAt(wire::Address address, std::shared_ptr<const Failure> failure);
  void release(wire::Address address);
  // The segment that holds [address, address + bytes). Throws wire::ProtocolError if there is none.
  Place resolve(wire::Address address, uint64_t bytes);
  // The same for a message that uses its bytes: afterwards they are in the device's memory, until
  // nothing but the segment holds its storage. If it `writes`, nobody else reads them.
  Place use(wire::Address address, uint64_t bytes, bool writes);
  // The message that runs now will use the segment: bringing another in must not displace it.
  void expect(wire::Address address);
  // The message that runs now.
  void setNow(uint64_t sequence) { now_ = sequence; }
  void setPager(Pager* pager);
  // Binds memory that is a host block of the client's.
  void adopt(wire::Address address, std::byte* data, uint64_t bytes);
  // Binds memory that other sessions have too. It is never swapped out.
  void share(wire::Address address, std::shared_ptr<SharedBlock> block, uint64_t bytes);
  // The bytes of a shared segment in memory of this session alone, to be bound in its place.
  c10::Storage unshared(wire::Address address);
  uint64_t sharedBytes() const { return shared_bytes_; }
  size_t sharedCount() const { return shared_count_; }

  uint64_t boundBytes() const { return bound_bytes_; }
  size_t count() const { return count_; }

 private:
  Segment& at(wire::Address address, uint64_t bytes);
  void say(uint32_t slot, const Segment& segment);
  void forgetReaders(Segment& segment);
  void retire(Segment& segment);
  c10::Storage snapshot(const Segment& segment) const;
  void set(wire::Address address, c10::Storage storage, uint64_t bytes);

  struct Freed {
    c10::Storage storage;
    std::vector<PeerRead> readers;
  };
  struct Slot {
    std::unique_ptr<Segment> segment;
    uint32_t back = 0;  // slots back to where the segment starts
  };

  uint32_t session_;
  transport::Places* places_ = nullptr;
  const memory::SharedMemory* host_ = nullptr;
  const memory::SharedMemory* arena_ = nullptr;
  const Peers* peers_ = nullptr;
  Pager* pager_ = nullptr;
  uint64_t now_ = 0;
  std::vector<Freed> freed_;     // that peers still read
  std::vector<PeerRead> noted_;  // by number of the note: who may still look at it
  std::vector<Slot> slots_;
  uint64_t bound_bytes_ = 0;
  uint64_t shared_bytes_ = 0;
  size_t shared_count_ = 0;
  size_t count_ = 0;
};

}  // namespace shoal::worker
