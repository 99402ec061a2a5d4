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

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "client/directory/extent_table.h"
#include "client/directory/lazy_copies.h"
#include "client/directory/lease_memory.h"
#include "client/directory/segment_table.h"
#include "client/directory/step.h"

namespace shoal::client {

class Directory {
 public:
  explicit Directory(uint32_t session)
      : segments_(session), extents_(segments_), copies_(segments_, members_) {}
  Directory(const Directory&) = delete;

  // --- members
  void addMember(uint64_t memory_bytes, uint64_t spill_bytes);
  // What the session knows of a member now. It says so before it asks for a step.
  void noteMember(uint32_t member, bool usable, uint64_t last_sequence) {
    members_[member] = {usable, last_sequence};
  }

  // --- parts
  const SegmentTable& segments() const { return segments_; }
  LeaseMemory& memory() { return memory_; }
  const LeaseMemory& memory() const { return memory_; }
  ExtentTable& extents() { return extents_; }
  LazyCopies& copies() { return copies_; }
  const StepLog& log() const { return log_; }

  // --- segments
  const Segment& at(wire::Address base) const { return segments_.at(base); }
  // A new segment, of device memory that no member has yet. `pinned` is -1 for the whole lease.
  // Returns 0 if no slot is left.
  wire::Address mint(uint64_t bytes, int pinned);
  // The segment has no copy any more and its slots may be used again.
  void released(wire::Address base);

  // --- where a call runs (placement.cpp)
  // The member where a call of the whole lease costs least; -1: no member is left.
  int place(std::span<const SegmentUse> uses, uint64_t made_bytes);

  // --- steps
  // Before a message of `member` reads the segment. The fast path needs no step.
  bool present(wire::Address base, uint32_t member) const {
    return (at(base).valid & bitOf(member)) != 0;
  }
  Step bringStep(wire::Address base, uint32_t member);
  // Before a message changes the segment: lazy copies of it are made.
  bool copiedLater(wire::Address base) const { return at(base).copied_later; }
  // Drops the copies of all members but those of `keep`.
  Step dropStep(wire::Address base, uint32_t keep) const {
    const uint32_t others = at(base).bound & ~keep;
    return others == 0 ? Step{} : dropOneOf(others, base);
  }
  // A step was carried out, by message `sequence` of `step.to`.
  void apply(const Step& step, uint64_t sequence);

  // --- what messages did
  void made(wire::Address base, uint32_t member, uint64_t sequence) {
    Segment& segment = segments_.at(base);
    segment.bound = segment.valid = bitOf(member);
    segment.used_at = calls_;
    memory_.bound(member, segment.bytes);
    wrote(base, member, sequence);
  }
  void wrote(wire::Address base, uint32_t member, uint64_t sequence) {
    Segment& segment = segments_.at(base);
    segment.home = static_cast<int8_t>(member);
    segment.written_at = sequence;
  }
  // The member with the present bytes; another one where the home is lost. -1: it has no memory.
  int home(wire::Address base);
  void setShared(wire::Address base, bool shared) { segments_.at(base).shared = shared; }
  // The copy on `member` is the host block at `offset`. Returns offset + 1 of the block before it.
  uint64_t setHostBlock(wire::Address base, uint32_t member, uint64_t offset);
  uint64_t dropHostBlock(wire::Address base) {
    return std::exchange(segments_.at(base).host_block, 0);
  }

  // What must be true at any moment. Empty, or the first thing that is wrong.
  std::string violation() const;

 private:
  friend class RoomSearch;
  Step dropOneOf(uint32_t members, wire::Address base) const;
  Step fetchStep(wire::Address base, uint32_t to);
  std::string violationOf(wire::Address base) const;

  SegmentTable segments_;
  std::vector<MemberState> members_;
  LeaseMemory memory_;
  ExtentTable extents_;
  LazyCopies copies_;
  StepLog log_;
  uint64_t calls_ = 0;  // the clock of `used_at`
};

}  // namespace shoal::client
