// The worker's page table: which memory of this device is behind an address of the client.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "wire/address.h"
#include "worker/accelerator/late.h"
#include "worker/memory/arena.h"
#include "worker/memory/shown_copies.h"
#include "worker/paging/eviction_policy.h"
#include "worker/paging/locations.h"
#include "worker/paging/segment.h"
#include "worker/paging/swapper.h"

namespace shoal::worker {

struct SegmentsOptions {
  uint32_t session = 1;
  Late* late = nullptr;                        // null where the device does not run late
  Arena* arena = nullptr;                      // null on accelerators: their segments never leave
  ShownCopies* shown = nullptr;                // what peers read there
  const memory::SharedMemory* host = nullptr;  // the client's region
  const Peers* peers = nullptr;                // what they read must neither change nor leave
  transport::LocationTable* locations =
      nullptr;  // where the table of locations is, if there is one
  SwapOptions swap;
  PolicyOptions policy;
};

// A checked location inside a segment.
struct Place {
  Segment* segment;
  uint64_t offset;  // bytes
};

class Segments final : private Reclaimer {
 public:
  explicit Segments(const SegmentsOptions& options);
  Segments(const Segments&) = delete;
  ~Segments();

  // From now on the eviction policy knows what the coming messages of the ring use.
  void lookAhead(const transport::RingConsumer& requests, Lookahead::AddressWords address_words) {
    if (swapper_ != nullptr) swapper_->lookAhead(requests, std::move(address_words));
  }
  // Message `sequence` runs next.
  void begin(uint64_t sequence) {
    policy_.setNow(sequence);
    if (swapper_ != nullptr) swapper_->between();
    if (late_ != nullptr) {
      late_->begin(sequence);
      if (!freed_.empty()) dropFreed(/*wait=*/false);
    }
  }

  // Binds `address` (the start of a segment) to memory, in place of what was there before.
  void bind(wire::Address address, c10::Storage storage, uint64_t bytes);
  // Binds memory that is a host block of the client's.
  void adopt(wire::Address address, std::byte* data, uint64_t bytes);
  // Binds memory that other sessions map too. It never leaves the device.
  void share(wire::Address address, std::shared_ptr<SharedBlock> block, uint64_t bytes);
  // Copies the bytes of a shared segment to memory of this session alone, to be bound in its place.
  c10::Storage unshared(wire::Address address);
  void poison(wire::Address address, std::shared_ptr<const Failure> failure);
  // Poisons the segment that holds `address`, unless it is poisoned already or does not exist.
  void poisonAt(wire::Address address, std::shared_ptr<const Failure> failure);
  void release(wire::Address address);

  // The segment that holds [address, address + bytes). Throws wire::ProtocolError if there is none.
  Place resolve(wire::Address address, uint64_t bytes);
  // The same for a message that uses the bytes: it brings them into the device's memory, where they
  // stay while anything but the segment holds its storage. If it `writes`, no peer reads them.
  Place use(wire::Address address, uint64_t bytes, bool writes);
  // The same for a copy that runs beside operators. Late::copyIn and copyOut order it.
  Place useBeside(wire::Address address, uint64_t bytes, bool writes);
  // Operators use segments that they do not name.
  void useAnything() {
    if (late_ != nullptr) late_->lanes.computeAnything();
  }
  // The message that runs will use the segment: bringing another in must not evict it.
  void expect(wire::Address address);
  // A peer will read the segment. Message `exported` says so, and notes where the segment is.
  void addReader(wire::Address address, PeerRead reader, uint64_t exported);

  // Between two messages: frees about `bytes` of the device's memory.
  void shrink(uint64_t bytes);

  // Gives unused host memory and swap space back to the system.
  void trim() {
    if (swapper_ != nullptr) swapper_->trim();
  }
  uint64_t swapBytes() const { return swapper_ == nullptr ? 0 : swapper_->bytes(); }
  uint64_t swappedBytes() const { return swapper_ == nullptr ? 0 : swapper_->usedBytes(); }
  SwapCounters counters() const {
    return swapper_ == nullptr ? SwapCounters() : swapper_->counters();
  }
  uint64_t sharedBytes() const { return shared_bytes_; }
  size_t sharedCount() const { return shared_count_; }
  uint64_t boundBytes() const { return bound_bytes_; }
  size_t count() const { return count_; }

 private:
  bool reclaim(uint64_t bytes) override;
  Segment& at(wire::Address address, uint64_t bytes);
  Segment& set(wire::Address address, c10::Storage storage, uint64_t bytes);
  void retire(Segment& segment);
  bool dropFreed(bool wait);
  c10::Storage snapshot(const Segment& segment) const;
  c10::Storage shownCopy(Segment& segment);
  bool keepForCopies(const Segment& segment);

  struct Freed {
    c10::Storage storage;
    std::vector<PeerRead> readers;
    uint64_t until = 0;  // the message after which no copy of the device uses it
  };
  struct Slot {
    std::unique_ptr<Segment> segment;
    uint32_t back = 0;  // slots back to where the segment starts
  };

  uint32_t session_;
  Late* late_;
  Arena* arena_;
  ShownCopies* shown_;
  const Peers* peers_;
  std::vector<Freed> freed_;     // that peers or copies still use
  std::vector<PeerRead> noted_;  // by number of the note: who may still look at it
  std::vector<Slot> slots_;
  uint64_t bound_bytes_ = 0;
  uint64_t limit_bytes_;
  uint64_t kept_bytes_ = 0;  // freed, for copies
  uint64_t shared_bytes_ = 0;
  size_t shared_count_ = 0;
  size_t count_ = 0;
  Locations locations_;
  EvictionPolicy policy_;
  std::unique_ptr<Swapper> swapper_;  // null where the arena is
};

}  // namespace shoal::worker
