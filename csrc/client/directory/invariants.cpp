// What must be true of a directory at any moment. Sanitized builds check it after every step, and
// the property tests state it.
#include <algorithm>

#include "client/directory/directory.h"

namespace shoal::client {

using wire::Address;

std::string Directory::violationOf(uint32_t slot) const {
  const Segment& segment = segments_[slot];
  const auto home_bit = segment.home < 0 ? 0 : bit(static_cast<uint32_t>(segment.home));
  if ((segment.valid & ~segment.bound) != 0) return "has bytes where it has no memory";
  if (segment.bound >> members_.size() != 0) return "is bound to a member that does not exist";
  if (segment.bound != 0 && (segment.bound & home_bit) == 0) return "has no memory at its home";
  if (segment.awaitsCopy() ? segment.valid != 0 : (segment.valid & home_bit) != home_bit) {
    return "has no present bytes at its home";
  }
  if (segment.shared && segment.bound != home_bit) return "is shared and has replicas";
  if (segment.host_block != 0 && (segment.bound & bit(segment.host_member)) == 0) {
    return "keeps a host block that nobody reads";
  }
  const auto listed = pending_.find(slot);
  if (segment.copied_later != (listed != pending_.end())) return "has a wrong flag of lazy copies";
  if (segment.copied_later) {
    for (const Address target : listed->second) {
      if (at(target).copy_of != wire::makeAddress(session_, slot)) return "lists a foreign copy";
      if (at(target).bytes != segment.bytes) return "has a lazy copy of another size";
    }
  }
  if (segment.copy_of != 0) {
    const auto found = pending_.find(wire::slotOf(segment.copy_of));
    const Address own = wire::makeAddress(session_, slot);
    if (found == pending_.end() || std::ranges::count(found->second, own) != 1) {
      return "waits for a lazy copy that its source does not list";
    }
  }
  return "";
}

std::string Directory::violation() const {
  std::vector<uint64_t> used(members_.size(), 0);
  std::vector<uint64_t> pinned(members_.size(), 0);
  uint64_t allocated = 0;
  uint64_t live = 0;
  for (uint32_t slot = 1; slot < next_slot_; ++slot) {
    const Segment& segment = segments_[slot];
    if (!segment.live) continue;
    const std::string wrong = violationOf(slot);
    if (!wrong.empty()) return "the segment in slot " + std::to_string(slot) + " " + wrong;
    ++live;
    allocated += segment.bytes;
    if (segment.pinned >= 0) pinned[static_cast<size_t>(segment.pinned)] += segment.bytes;
    for (uint32_t member = 0; member < members_.size(); ++member) {
      if ((segment.bound & bit(member)) != 0) used[member] += segment.bytes;
    }
  }
  if (live != live_) return "the count of live segments is wrong";
  if (allocated != memory_.allocated_bytes) return "the sum of allocated bytes is wrong";
  for (uint32_t member = 0; member < members_.size(); ++member) {
    const std::string name = "member " + std::to_string(member);
    if (used[member] != members_[member].used_bytes) return name + " has a wrong sum of used bytes";
    if (pinned[member] != members_[member].pinned_bytes) return name + " has a wrong pinned sum";
  }
  for (const auto& [slot, extents] : sharded_) {
    const std::string name = "the sharded segment in slot " + std::to_string(slot);
    if (segments_[slot].live) return name + " counts as an ordinary one";
    uint64_t start = 0;
    for (const Extent& extent : *extents) {
      if (extent.start != start || at(extent.base).bytes != extent.bytes) return name + " has gaps";
      if (!at(extent.base).live) return name + " has an extent that was freed";
      start += extent.bytes;
    }
    if (start != segments_[slot].bytes) return name + " is not covered by its extents";
  }
  return "";
}

}  // namespace shoal::client
