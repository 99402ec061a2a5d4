// How much memory a lease and its members have, and how much of it segments take.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "client/directory/segment_table.h"

namespace shoal::client {

struct MemoryUse {
  uint64_t allocated_bytes = 0;
  uint64_t peak_bytes = 0;
  uint64_t limit_bytes = 0;   // device memory and swap space
  uint64_t memory_bytes = 0;  // device memory alone
  uint64_t allocations = 0;
  uint64_t frees = 0;
};

// A request for memory that the lease does not have.
struct Shortage {
  bool whole_lease;
  uint32_t member;
  uint64_t used_bytes, limit_bytes, memory_bytes;
};

class LeaseMemory {
 public:
  void addMember(uint64_t memory_bytes, uint64_t spill_bytes);
  bool single() const { return members_.size() == 1; }

  // --- limits. `pinned` is the member whose device is meant; -1: the whole lease.
  // Whether the lease has room for `bytes` more.
  bool fits(uint64_t bytes, int pinned) const {
    if (lease_.allocated_bytes + bytes > lease_.limit_bytes) return false;
    if (pinned < 0 || single()) return true;
    const OfMember& member = members_[static_cast<size_t>(pinned)];
    return member.pinned_bytes + bytes <= member.limitBytes();
  }
  // What the lease has, where it has no room.
  Shortage shortage(int pinned) const;
  uint64_t memoryBytes(uint32_t member) const { return members_[member].memory_bytes; }
  uint64_t largestMemoryBytes() const { return largest_memory_bytes_; }
  // A larger segment is sharded.
  uint64_t wholeBytesMax() const { return whole_bytes_max_; }

  // --- use
  uint64_t roomOf(uint32_t member) const {  // in device memory
    return left(members_[member].memory_bytes, members_[member].used_bytes);
  }
  uint64_t spaceOf(uint32_t member) const {  // in device memory and swap space
    return left(members_[member].limitBytes(), members_[member].used_bytes);
  }
  uint64_t liveSegments() const { return lease_.allocations - lease_.frees; }
  const MemoryUse& use() const { return lease_; }
  MemoryUse use(uint32_t member) const;
  void resetPeak() { lease_.peak_bytes = lease_.allocated_bytes; }

  // --- what happened
  void minted(uint64_t bytes, int pinned) {
    if (pinned >= 0) members_[static_cast<size_t>(pinned)].pinned_bytes += bytes;
    lease_.allocated_bytes += bytes;
    lease_.peak_bytes = std::max(lease_.peak_bytes, lease_.allocated_bytes);
    ++lease_.allocations;
  }
  void released(uint64_t bytes, int pinned) {
    if (pinned >= 0) members_[static_cast<size_t>(pinned)].pinned_bytes -= bytes;
    lease_.allocated_bytes -= bytes;
    ++lease_.frees;
  }
  // A member has memory for a segment, or none any more.
  void bound(uint32_t member, uint64_t bytes) { members_[member].used_bytes += bytes; }
  void unbound(uint32_t member, uint64_t bytes) { members_[member].used_bytes -= bytes; }

  // What differs from the sums over these segments; empty: nothing.
  std::string violation(const SegmentTable& segments) const;

 private:
  struct OfMember {
    uint64_t memory_bytes, spill_bytes;
    uint64_t used_bytes = 0;    // of all segments bound there
    uint64_t pinned_bytes = 0;  // of the live segments of its device
    uint64_t limitBytes() const { return memory_bytes + spill_bytes; }
  };
  static uint64_t left(uint64_t limit, uint64_t used) { return used < limit ? limit - used : 0; }

  std::vector<OfMember> members_;
  MemoryUse lease_;
  uint64_t largest_memory_bytes_ = 0;
  uint64_t whole_bytes_max_ = UINT64_MAX;
};

}  // namespace shoal::client
