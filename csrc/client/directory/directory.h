// Where every segment of a lease is: which members have memory for it, which have its present
// bytes, and what must happen before a message may use it. Pure: the directory knows no op stream,
// no lock and no torch. Events go in, steps come out; the session carries them out and reports
// back.
//
// The client decides where every segment lives, so keeping copies coherent costs no message but the
// copies themselves.
//
// A step is decided, carried out, and applied, one at a time. A step that fails is not applied, so
// the directory never claims what a worker does not have. Only `free` is applied first: a worker
// that cannot be told of it is gone, and its memory with it.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "wire/address.h"

namespace shoal::client {

// Member devices that one lease can have; bits of a 32-bit mask.
inline constexpr uint32_t kMembersMax = 32;

struct MemoryUse {
  uint64_t allocated_bytes = 0;
  uint64_t peak_bytes = 0;
  uint64_t limit_bytes = 0;   // device memory and swap space
  uint64_t memory_bytes = 0;  // device memory alone
  uint64_t allocations = 0;
  uint64_t frees = 0;
};

// A segment that a call uses.
struct SegmentUse {
  wire::Address base;
  bool writes;
};

// A shard of a segment that is larger than any device: an ordinary segment of its own.
struct Extent {
  wire::Address base;
  uint64_t start;  // in the sharded segment
  uint64_t bytes;
};
using Extents = std::vector<Extent>;  // without gaps, in order

struct Segment {
  uint64_t bytes = 0;
  uint64_t host_block = 0;   // offset + 1 of the host block that holds the bytes; 0: none
  uint64_t written_at = 0;   // sequence number on its home
  uint64_t used_at = 0;      // in calls of this lease; kept where there are several members
  uint32_t bound = 0;        // members that have memory for it
  uint32_t valid = 0;        // of these, the members with its present bytes
  uint32_t host_member = 0;  // the member whose copy is the host block
  int8_t home = -1;          // the member that wrote it last
  int8_t pinned = -1;        // the member whose device it belongs to; -1: the whole lease
  bool live = false;
  bool shared = false;        // in memory that other sessions have too: on its home, and only there
  bool copied_later = false;  // lazy copies of it are pending
  int8_t lost_source = -1;    // the member that was lost with its pending copy's source
  wire::Address extent_of = 0;  // the sharded segment that it belongs to; 0: none
  wire::Address copy_of = 0;    // the source of its pending copy; 0: none
  // It has no bytes until its pending copy is made.
  bool awaitsCopy() const { return copy_of != 0 || lost_source >= 0; }
};

// What the session must do next. `kFetch` with `target` == `source` makes a replica; otherwise it
// makes a pending copy.
struct Step {
  enum class Kind : uint8_t { kNone, kAllocate, kFetch, kFree, kRaise };
  enum class Reason : uint8_t { kNone, kSharded, kShared, kLost };
  Kind kind = Kind::kNone;
  Reason reason = Reason::kNone;
  uint8_t to = 0;    // the member that gets or loses memory; for kRaise: the member concerned
  uint8_t from = 0;  // the member that has the bytes
  wire::Address target = 0;
  wire::Address source = 0;
  uint64_t host_block = 0;  // kFree: the host block that the copy was; 0: none
  explicit operator bool() const { return kind != Kind::kNone; }
};

// A request for memory that the lease does not have.
struct Shortage {
  bool whole_lease;
  uint32_t member;
  uint64_t used_bytes, limit_bytes, memory_bytes;
};

class Directory {
 public:
  explicit Directory(uint32_t session);

  // --- members
  void addMember(uint64_t memory_bytes, uint64_t spill_bytes);
  // What the session knows of a member now. It says so before it asks for a step.
  void noteMember(uint32_t member, bool usable, uint64_t last_sequence) {
    members_[member].usable = usable;
    members_[member].last_sequence = last_sequence;
  }
  bool single() const { return members_.size() == 1; }

  // --- segments
  const Segment& at(wire::Address base) const { return segments_[wire::slotOf(base)]; }
  bool known(wire::Address base) const { return wire::slotOf(base) < next_slot_ && at(base).live; }
  // A new segment, of device memory that no member has yet. `pinned` is -1 for the whole lease.
  // Returns 0 if no slot is left.
  wire::Address mint(uint64_t bytes, int pinned);
  // The segment has no copy any more and its slots may be used again.
  void released(wire::Address base);
  // Whether the lease has room for `bytes` more. If not, `shortage` says what it has.
  bool fits(uint64_t bytes, int pinned, Shortage& shortage) const;
  uint64_t liveSegments() const { return live_; }
  // Calls `see(address, segment)` for every live segment.
  template <typename See>
  void each(const See& see) const {
    for (uint32_t slot = 1; slot < next_slot_; ++slot) {
      if (segments_[slot].live) see(wire::makeAddress(session_, slot), segments_[slot]);
    }
  }

  // --- sharded segments, which consist of extents
  wire::Address joinExtents(Extents extents, int pinned);
  Extents splitExtents(wire::Address base);
  const Extents* extents(wire::Address base) const {
    if (sharded_.empty()) return nullptr;
    const auto found = sharded_.find(wire::slotOf(base));
    return found == sharded_.end() ? nullptr : found->second.get();
  }
  uint64_t largestMemoryBytes() const { return largest_memory_bytes_; }
  // A larger segment is sharded.
  uint64_t wholeBytesMax() const { return whole_bytes_max_; }

  // --- where a call runs (placement.cpp)
  // The member where a call of the whole lease costs least; -1: no member is left.
  int place(std::span<const SegmentUse> uses, uint64_t made_bytes);
  uint64_t roomOf(uint32_t member) const;   // in device memory
  uint64_t spaceOf(uint32_t member) const;  // in device memory and swap space

  // --- steps
  // Before a message of `member` reads the segment. The fast path needs no step.
  bool present(wire::Address base, uint32_t member) const {
    return (at(base).valid & bit(member)) != 0;
  }
  Step bringStep(wire::Address base, uint32_t member);
  // Before a message changes the segment: lazy copies of it are made.
  bool copiedLater(wire::Address base) const { return at(base).copied_later; }
  Step flushStep(wire::Address base);
  // Drops the copies of all members but those of `keep`.
  Step dropStep(wire::Address base, uint32_t keep) const;
  // A step was carried out, by message `sequence` of `step.to`.
  void apply(const Step& step, uint64_t sequence);

  // --- what messages did
  void made(wire::Address base, uint32_t member, uint64_t sequence);
  void wrote(wire::Address base, uint32_t member, uint64_t sequence) {
    Segment& segment = segmentAt(base);
    segment.home = static_cast<int8_t>(member);
    segment.written_at = sequence;
  }
  // The member with the present bytes; another one where the home is lost. -1: it has no memory.
  int home(wire::Address base);
  void setShared(wire::Address base, bool shared) { segmentAt(base).shared = shared; }
  // The copy on `member` is the host block at `offset`. Returns offset + 1 of the block before it.
  uint64_t setHostBlock(wire::Address base, uint32_t member, uint64_t offset);
  uint64_t dropHostBlock(wire::Address base) {
    return std::exchange(segmentAt(base).host_block, 0);
  }

  // --- lazy copies (lazy_copies.cpp)
  // Whether a copy of the whole segment may be made when the target is used first.
  bool canCopyLater(wire::Address to, wire::Address from) const;
  void copyLater(wire::Address to, wire::Address from);
  // The pending copy to `base` is not needed any more: all of it changes.
  void cancelCopy(wire::Address base);
  // The next pending copy of a segment that is released.
  Step flushForRelease(wire::Address base);
  // That step failed: a use of its target raises, if the source is what was lost.
  void loseCopy(wire::Address target, bool source_usable);

  // --- state
  const MemoryUse& memoryUse() const { return memory_; }
  MemoryUse memoryUse(uint32_t member) const;
  void resetPeak() { memory_.peak_bytes = memory_.allocated_bytes; }
  // What must be true at any moment. Empty, or the first thing that is wrong.
  std::string violation() const;
  // The latest steps, oldest first, to explain a bug after the fact.
  std::vector<Step> latestSteps() const;

 private:
  friend class RoomSearch;
  struct MemberState {
    uint64_t memory_bytes, spill_bytes;
    uint64_t used_bytes = 0;    // of all segments bound there
    uint64_t pinned_bytes = 0;  // of the live segments of its device
    uint64_t last_sequence = 0;
    bool usable = true;
    uint64_t limit() const { return memory_bytes + spill_bytes; }
  };

  static uint32_t bit(uint32_t member) { return uint32_t{1} << member; }
  Segment& segmentAt(wire::Address base) { return segments_[wire::slotOf(base)]; }
  uint32_t takeSlots(uint64_t count);
  void giveSlots(uint32_t slot, uint64_t count);
  void moveHome(Segment& segment, uint32_t member);
  void promote(Segment& segment);
  Step fetchStep(wire::Address base, uint32_t to);
  Step copyStep(wire::Address target);
  // Segments on a member that the present call does not use, the least recently used first.
  std::vector<uint32_t> leastUsed(uint32_t member) const;
  uint32_t usableMask() const;
  int emptiest(uint32_t but, uint64_t bytes) const;
  std::string violationOf(uint32_t slot) const;

  uint32_t session_;
  std::vector<MemberState> members_;
  std::vector<Segment> segments_;  // by slot
  std::vector<uint32_t> free_slots_;
  std::map<uint64_t, std::vector<uint32_t>> free_runs_;  // of segments of several slots, by count
  uint32_t next_slot_ = 1;
  uint64_t live_ = 0;
  uint64_t calls_ = 0;  // the clock of `used_at`
  MemoryUse memory_;
  uint64_t largest_memory_bytes_ = 0;
  uint64_t whole_bytes_max_ = UINT64_MAX;
  std::unordered_map<uint32_t, std::unique_ptr<Extents>> sharded_;  // by slot
  // By the slot of a source: the targets of its pending copies.
  std::unordered_map<uint32_t, std::vector<wire::Address>> pending_;

  static constexpr size_t kLogSteps = 256;
  std::array<Step, kLogSteps> log_{};
  uint64_t logged_ = 0;
};

// Finds the steps that give a call room on a member, by moving what was not used for long.
class RoomSearch {
 public:
  RoomSearch(Directory& directory, uint32_t member, std::span<const SegmentUse> uses,
             uint64_t made_bytes);
  // Whether a step may be left.
  bool needed() const { return phase_ != Phase::kDone; }
  Step next();

 private:
  enum class Phase : uint8_t { kOwnReplicas, kMove, kAllReplicas, kDone };
  Step dropReplica(uint64_t goal_bytes);
  Step dropAllReplicas();
  Step moveAway();
  void lookForReplicas(uint32_t member);

  Directory& directory_;
  uint32_t member_;
  uint64_t needed_bytes_ = 0, goal_bytes_ = 0;
  Phase phase_ = Phase::kDone;
  bool dropped_all_ = false;
  uint32_t replicas_on_ = 0;        // the member that `replicas_` are of
  std::vector<uint32_t> replicas_;  // slots that may be replicas, from `next_replica_` on
  size_t next_replica_ = 0;
  std::vector<uint32_t> movable_;  // slots of `member_`, from `next_movable_` on
  size_t next_movable_ = 0;
};

}  // namespace shoal::client
