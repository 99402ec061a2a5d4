// Keeps a device's memory within its limit: segments that are needed last go to swap space, and
// come back before they are used.
//
// Victims, in this order: segments that the stream frees before it uses them again (nothing is
// written), then those whose next use is furthest ahead: exact inside the window that the client is
// ahead, learned from the last gap between two uses beyond it. A segment with a valid copy in swap
// space costs no write, so it goes at half the distance.
//
// The reserve is not empty memory, which would hold nothing that is used again. It is what can go
// at once: free memory, and the next victims, whose bytes a thread has written to swap space while
// the device computed. They stay until their room is really needed.
#pragma once

#include <c10/core/Storage.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "worker/paging/arena.h"
#include "worker/paging/copier.h"
#include "worker/paging/lookahead.h"
#include "worker/paging/swap_space.h"

namespace shoal::worker {

struct Segment;

struct PagerOptions {
  SwapOptions swap;
  uint64_t limit_bytes = 0;   // of the device
  bool least_recent = false;  // plain LRU on demand, to compare with
};

struct PagerCounters {
  uint64_t in_bytes = 0, out_bytes = 0;  // between the device and swap space
  uint64_t disk_bytes = 0;               // of both, from and to disk
  uint64_t dropped_bytes = 0;            // that needed no copy: dead, or unchanged
  uint64_t prefetched_bytes = 0;         // of those in, that were there before they were used
  int64_t stall_ns = 0;                  // the device waited for copies
};

// A segment's share in paging.
struct Residency {
  uint64_t used_at = 0;  // message that used it last
  // Messages between its last uses, latest first; 0: not known. A loop repeats them.
  std::array<uint32_t, 8> gaps{};
  std::optional<SwapBlock> swap;
  std::shared_ptr<CopyJob> incoming;  // it is on its way in: memory is there, bytes are not yet
  std::shared_ptr<CopyJob> outgoing;  // a copy is being made in swap space; it is still here
  uint32_t slot = 0;
  uint32_t number = UINT32_MAX;  // its place among the pager's resident segments
  bool dirty = true;             // changed since its copy in swap space was made
  bool dropped = false;          // it was dead; its bytes are gone
  bool in_place = false;         // its memory is the client's host block itself
};

class Pager {
 public:
  Pager(PagerOptions options, Arena& arena);
  ~Pager();

  void setLookahead(Lookahead* lookahead) { lookahead_ = lookahead; }
  // A segment got memory, or lost it.
  void bound(Segment& segment, uint32_t slot);
  void freed(Segment& segment);
  // Before a message uses the segment: its bytes are in the device's memory.
  void use(Segment& segment, uint64_t sequence, bool writes);
  // The message that runs will use the segment: it stays.
  void expect(Residency& residency, uint64_t sequence) {
    now_ = sequence;
    if (sequence == residency.used_at) return;
    if (residency.used_at > 0) {
      std::copy_backward(residency.gaps.begin(), residency.gaps.end() - 1, residency.gaps.end());
      residency.gaps[0] = static_cast<uint32_t>(sequence - residency.used_at);
    }
    residency.used_at = sequence;
  }
  // Frees at least `bytes` of the device's memory; false if nothing can go.
  bool reclaim(uint64_t bytes);
  // Before message `sequence` runs: brings what comes next, while there is room.
  void between(uint64_t sequence);
  // A segment whose memory is a host block of the client's.
  void adopted(Segment& segment, uint32_t slot, std::byte* data);
  // A segment in memory that other sessions have too: it counts, and never leaves.
  void shared(Segment& segment, uint32_t slot);
  // Gives memory that holds nothing back to the system.
  void trim() { swap_.trim(); }
  uint64_t spillBytes() const { return swap_.bytes(); }

  const PagerCounters& counters() const { return counters_; }
  uint64_t swappedBytes() const { return swap_.usedBytes(); }
  // Told when a segment's memory moves, so that others do not read the old one.
  std::function<void(Segment&)> moved;
  // Whether no other device reads the segment any more; with `wait`, once none does.
  std::function<bool(Segment&, bool wait)> readers_gone;

 private:
  static constexpr uint64_t kReservePart = 32;  // of the limit, that can go at once

  struct Exchange {
    std::vector<Segment*> left;  // for swap space, to make room for what comes
    bool failed = false;
  };

  static uint64_t nextGap(const Residency& residency);
  double distance(const Segment& segment) const;
  bool evictable(Segment& segment) const;
  // The one that is used furthest ahead; of those that need room in swap space only such with less
  // than `refused_bytes`.
  Segment* victim(double further_than, uint64_t refused_bytes = UINT64_MAX) const;
  bool needsSwap(const Segment& segment) const;
  bool isDead(const Segment& segment) const;
  bool evict(Segment& segment);
  bool copyOut(Segment& segment, bool ahead);
  bool copiedOut(Segment& segment);
  void dropCopyOut(Segment& segment);
  void vacate(Segment& segment);
  bool settleIncoming();
  bool awaitReaders();
  bool makeRoomAhead(uint64_t bytes, double further_than);
  void keepReserve();
  void prefetch(uint64_t sequence);
  uint64_t reserveBytes() const { return options_.limit_bytes / kReservePart; }
  bool takeBackCopies(uint64_t bytes);
  void bringIn(Segment& segment, bool ahead);
  void exchange(Segment& segment);
  void putBack(Segment& segment, const std::vector<std::byte>& aside);
  [[noreturn]] static void refuseLost(const Segment& segment);
  void arrived(Segment& segment);
  void count(const SwapBlock& block, int64_t bytes, bool out);
  void add(Segment& segment, uint32_t slot);
  void remove(Segment& segment);

  PagerOptions options_;
  Arena& arena_;
  Lookahead* lookahead_ = nullptr;
  SwapSpace swap_;
  std::unique_ptr<Copier> copier_;
  std::vector<Segment*> resident_;
  std::unordered_map<uint32_t, Segment*> swapped_;   // by slot
  std::vector<std::pair<double, Segment*>> ranked_;  // scratch of `keepReserve`
  PagerCounters counters_;
  Exchange* exchange_ = nullptr;  // the one under way
  uint64_t now_ = 0;              // the message that runs
  size_t incoming_ = 0;           // segments on their way in
  bool active_ = false;           // something was reclaimed: the future matters from now on
  bool reserve_full_ = false;     // nothing has left since the reserve was found full
};

}  // namespace shoal::worker
