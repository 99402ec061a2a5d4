#include "client/directory/lease_memory.h"

namespace shoal::client {

void LeaseMemory::addMember(uint64_t memory_bytes, uint64_t spill_bytes) {
  lease_.limit_bytes += memory_bytes + spill_bytes;
  lease_.memory_bytes += memory_bytes;
  largest_memory_bytes_ = std::max(largest_memory_bytes_, memory_bytes);
  // One device alone, without swap space, gains nothing by shards.
  if (!members_.empty() || spill_bytes > 0) whole_bytes_max_ = largest_memory_bytes_ / 2;
  members_.push_back({memory_bytes, spill_bytes});
}

Shortage LeaseMemory::shortage(int pinned) const {
  if (pinned < 0 || single()) {
    return {true, 0, lease_.allocated_bytes, lease_.limit_bytes, lease_.memory_bytes};
  }
  const OfMember& member = members_[static_cast<size_t>(pinned)];
  return {false, static_cast<uint32_t>(pinned), member.pinned_bytes, member.limitBytes(),
          member.memory_bytes};
}

MemoryUse LeaseMemory::use(uint32_t member) const {
  MemoryUse use = lease_;
  use.allocated_bytes = use.peak_bytes = members_[member].used_bytes;
  use.limit_bytes = members_[member].limitBytes();
  use.memory_bytes = members_[member].memory_bytes;
  return use;
}

std::string LeaseMemory::violation(const SegmentTable& segments) const {
  std::vector<uint64_t> used(members_.size(), 0);
  std::vector<uint64_t> pinned(members_.size(), 0);
  uint64_t allocated = 0;
  uint64_t live = 0;
  segments.each([&](wire::Address, const Segment& segment) {
    ++live;
    allocated += segment.bytes;
    if (segment.pinned >= 0) pinned[static_cast<size_t>(segment.pinned)] += segment.bytes;
    for (uint32_t member = 0; member < members_.size(); ++member) {
      if ((segment.bound & bitOf(member)) != 0) used[member] += segment.bytes;
    }
  });
  if (live != liveSegments()) return "the count of live segments is wrong";
  if (allocated != lease_.allocated_bytes) return "the sum of allocated bytes is wrong";
  for (uint32_t member = 0; member < members_.size(); ++member) {
    const std::string name = "member " + std::to_string(member);
    if (used[member] != members_[member].used_bytes) return name + " has a wrong sum of used bytes";
    if (pinned[member] != members_[member].pinned_bytes) return name + " has a wrong pinned sum";
  }
  return "";
}

}  // namespace shoal::client
