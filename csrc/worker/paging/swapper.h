// Moves segments between the device's memory and swap space, as the eviction policy decides, and
// keeps the device within its limit.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "worker/memory/arena.h"
#include "worker/memory/copier.h"
#include "worker/memory/swap_space.h"
#include "worker/paging/eviction_policy.h"
#include "worker/paging/locations.h"
#include "worker/paging/lookahead.h"
#include "worker/paging/segment.h"

namespace shoal::worker {

struct SwapCounters {
  uint64_t in_bytes = 0, out_bytes = 0;  // between the device and swap space
  uint64_t disk_bytes = 0;               // of both, from and to disk
  uint64_t dropped_bytes = 0;            // left without a copy: dead, or unchanged
  uint64_t prefetched_bytes = 0;         // of those in, present before they were used
  int64_t stall_ns = 0;                  // the device waited for copies
};

class Swapper {
 public:
  Swapper(const SwapOptions& options, Arena& arena, EvictionPolicy& policy, Locations& locations,
          const Peers* peers)
      : arena_(arena), policy_(policy), locations_(locations), peers_(peers), swap_(options) {}
  ~Swapper();

  // From now on the policy knows what the coming messages of the ring use.
  void lookAhead(const transport::RingConsumer& requests, Lookahead::AddressWords address_words);
  // A segment got memory of the arena, memory that is a host block of the client's, or memory that
  // other sessions map too. The last never leaves.
  void bound(Segment& segment);
  void adopted(Segment& segment, std::byte* data);
  void shared(Segment& segment);
  // A segment loses its memory.
  void freed(Segment& segment);
  // Brings the bytes of the segment into the device's memory, for the message that runs.
  void use(Segment& segment, bool writes);
  // Frees at least `bytes` of the device's memory. Returns false if nothing can leave.
  bool reclaim(uint64_t bytes);
  // Starts the copies that the coming messages need. Call it before each message.
  void between();
  // Gives unused memory back to the system.
  void trim() { swap_.trim(); }

  uint64_t bytes() const { return swap_.bytes(); }
  uint64_t usedBytes() const { return swap_.usedBytes(); }
  const SwapCounters& counters() const { return counters_; }

 private:
  struct Exchange {
    std::vector<Segment*> left;  // for swap space, to make room for the segment that comes
    bool failed = false;
  };

  bool canLeave(Segment& segment) const;
  Segment* victim(double further_than, uint64_t refused_bytes = UINT64_MAX) const;
  bool needsSwap(const Segment& segment) const;
  bool evict(Segment& segment);
  bool copyOut(Segment& segment, bool ahead);
  bool copiedOut(Segment& segment);
  void dropCopyOut(Segment& segment);
  void vacate(Segment& segment);
  bool awaitIncoming();
  bool awaitReaders();
  bool makeRoomAhead(uint64_t bytes, double further_than);
  void fillReserve();
  void prefetch();
  bool takeBackCopies(uint64_t bytes);
  c10::Storage allocate(uint64_t bytes);
  void bringIn(Segment& segment, bool ahead);
  void exchange(Segment& segment);
  void putBack(Segment& segment, const std::vector<std::byte>& aside);
  [[noreturn]] static void refuseLost(const Segment& segment);
  void arrived(Segment& segment);
  void count(const SwapBlock& block, int64_t bytes, bool out);
  void moveAway(const Segment& segment, bool out);

  Arena& arena_;
  EvictionPolicy& policy_;
  Locations& locations_;
  const Peers* peers_;
  SwapSpace swap_;
  std::unique_ptr<Lookahead> lookahead_;
  std::unique_ptr<Copier> copier_;  // from the first shortage on
  SwapCounters counters_;
  Exchange* exchange_ = nullptr;  // the one under way
  size_t incoming_ = 0;           // segments on their way in
  bool reserve_full_ = false;     // nothing has left since the reserve was found full
};

}  // namespace shoal::worker
