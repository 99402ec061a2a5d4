#include "client/directory/directory.h"

#include <algorithm>

namespace shoal::client {

using wire::Address;

Directory::Directory(uint32_t session) : session_(session) {
  segments_.resize(1024);
}

void Directory::addMember(uint64_t memory_bytes, uint64_t spill_bytes) {
  memory_.limit_bytes += memory_bytes + spill_bytes;
  memory_.memory_bytes += memory_bytes;
  largest_memory_bytes_ = std::max(largest_memory_bytes_, memory_bytes);
  // One device alone, without swap space, gains nothing by shards.
  if (!members_.empty() || spill_bytes > 0) whole_bytes_max_ = largest_memory_bytes_ / 2;
  members_.push_back({memory_bytes, spill_bytes});
}

// --- segments

bool Directory::fits(uint64_t bytes, int pinned, Shortage& shortage) const {
  const bool in_lease = memory_.allocated_bytes + bytes <= memory_.limit_bytes;
  if (pinned < 0 || single()) {
    shortage = {true, 0, memory_.allocated_bytes, memory_.limit_bytes, memory_.memory_bytes};
    return in_lease;
  }
  const MemberState& member = members_[static_cast<size_t>(pinned)];
  shortage = {false, static_cast<uint32_t>(pinned), member.pinned_bytes, member.limit(),
              member.memory_bytes};
  return in_lease && member.pinned_bytes + bytes <= member.limit();
}

Address Directory::mint(uint64_t bytes, int pinned) {
  const uint32_t slot = takeSlots(wire::slotsFor(bytes));
  if (slot == 0) return 0;
  Segment& segment = segments_[slot];
  segment = Segment();
  segment.bytes = bytes;
  segment.live = true;
  segment.pinned = static_cast<int8_t>(pinned);
  if (pinned >= 0) members_[static_cast<size_t>(pinned)].pinned_bytes += bytes;
  memory_.allocated_bytes += bytes;
  memory_.peak_bytes = std::max(memory_.peak_bytes, memory_.allocated_bytes);
  ++memory_.allocations;
  ++live_;
  return wire::makeAddress(session_, slot);
}

uint32_t Directory::takeSlots(uint64_t count) {
  auto& free = count == 1 ? free_slots_ : free_runs_[count];
  if (!free.empty()) {
    const uint32_t slot = free.back();
    free.pop_back();
    return slot;
  }
  if (next_slot_ + count > wire::kSlotsMax) return 0;
  const uint32_t slot = next_slot_;
  next_slot_ += static_cast<uint32_t>(count);
  if (segments_.size() < next_slot_) {
    segments_.resize(std::max<size_t>(next_slot_, segments_.size() * 2));
  }
  return slot;
}

void Directory::giveSlots(uint32_t slot, uint64_t count) {
  (count == 1 ? free_slots_ : free_runs_[count]).push_back(slot);
}

void Directory::released(Address base) {
  Segment& segment = segmentAt(base);
  memory_.allocated_bytes -= segment.bytes;
  if (segment.pinned >= 0) {
    members_[static_cast<size_t>(segment.pinned)].pinned_bytes -= segment.bytes;
  }
  ++memory_.frees;
  --live_;
  const uint64_t count = wire::slotsFor(segment.bytes);
  segment = Segment();
  giveSlots(wire::slotOf(base), count);
}

// --- sharded segments

Address Directory::joinExtents(Extents extents, int pinned) {
  const uint64_t bytes = extents.back().start + extents.back().bytes;
  const uint32_t slot = takeSlots(wire::slotsFor(bytes));
  if (slot == 0) return 0;
  Segment& segment = segments_[slot];
  segment = Segment();  // not live: only its extents are placed and counted
  segment.bytes = bytes;
  segment.pinned = static_cast<int8_t>(pinned);
  const Address base = wire::makeAddress(session_, slot);
  for (const Extent& extent : extents) segmentAt(extent.base).extent_of = base;
  sharded_[slot] = std::make_unique<Extents>(std::move(extents));
  return base;
}

Extents Directory::splitExtents(Address base) {
  const uint32_t slot = wire::slotOf(base);
  Extents extents = std::move(*sharded_.at(slot));
  for (const Extent& extent : extents) segmentAt(extent.base).extent_of = 0;
  sharded_.erase(slot);
  giveSlots(slot, wire::slotsFor(segments_[slot].bytes));
  segments_[slot] = Segment();
  return extents;
}

// --- steps

int Directory::home(Address base) {
  Segment& segment = segmentAt(base);
  if (segment.home >= 0) promote(segment);
  return segment.home;
}

// Where the home is lost, the member of another copy becomes the home.
void Directory::promote(Segment& segment) {
  if (members_[static_cast<size_t>(segment.home)].usable) return;
  for (uint32_t member = 0; member < members_.size(); ++member) {
    if (members_[member].usable && (segment.valid & bit(member)) != 0) {
      return moveHome(segment, member);
    }
  }
}

void Directory::moveHome(Segment& segment, uint32_t member) {
  segment.home = static_cast<int8_t>(member);
  segment.written_at = members_[member].last_sequence;  // by then at the latest
}

Step Directory::bringStep(Address base, uint32_t member) {
  const Segment& segment = at(base);
  if ((segment.valid & bit(member)) != 0) return {};
  if (!segment.live) return {Step::Kind::kRaise, Step::Reason::kSharded};
  if (segment.shared) {
    return {Step::Kind::kRaise, Step::Reason::kShared, static_cast<uint8_t>(segment.home)};
  }
  if (segment.awaitsCopy()) return copyStep(base);
  if (segment.bound != 0) return fetchStep(base, member);
  return {Step::Kind::kAllocate, Step::Reason::kNone, static_cast<uint8_t>(member), 0, base};
}

Step Directory::fetchStep(Address base, uint32_t to) {
  Segment& segment = segmentAt(base);
  promote(segment);
  const auto from = static_cast<uint8_t>(segment.home);
  if (!members_[from].usable) return {Step::Kind::kRaise, Step::Reason::kLost, from};
  return {Step::Kind::kFetch, Step::Reason::kNone, static_cast<uint8_t>(to), from, base, base};
}

// The home goes last, so that it always has the bytes.
Step Directory::dropStep(Address base, uint32_t keep) const {
  const Segment& segment = at(base);
  const uint32_t others = segment.bound & ~keep;
  if (others == 0) return {};
  const uint32_t replicas = segment.home < 0 ? others : others & ~bit(segment.home);
  const auto member = static_cast<uint8_t>(__builtin_ctz(replicas != 0 ? replicas : others));
  const bool in_host_block = segment.host_block != 0 && segment.host_member == member;
  return {Step::Kind::kFree,
          Step::Reason::kNone,
          member,
          0,
          base,
          0,
          in_host_block ? segment.host_block : 0};
}

void Directory::apply(const Step& step, uint64_t sequence) {
  Segment& segment = segmentAt(step.target);
  switch (step.kind) {
    case Step::Kind::kAllocate:
      made(step.target, step.to, sequence);
      break;
    case Step::Kind::kFetch:
      if (step.target == step.source) {
        segment.bound |= bit(step.to);
        segment.valid |= bit(step.to);
        members_[step.to].used_bytes += segment.bytes;
      } else {
        cancelCopy(step.target);
        wrote(step.target, step.to, sequence);
      }
      break;
    case Step::Kind::kFree:
      segment.bound &= ~bit(step.to);
      segment.valid &= ~bit(step.to);
      members_[step.to].used_bytes -= segment.bytes;
      if (step.host_block != 0) segment.host_block = 0;
      break;
    case Step::Kind::kNone:
    case Step::Kind::kRaise:
      return;
  }
  log_[logged_++ % kLogSteps] = step;
}

void Directory::made(Address base, uint32_t member, uint64_t sequence) {
  Segment& segment = segmentAt(base);
  segment.bound = segment.valid = bit(member);
  segment.home = static_cast<int8_t>(member);
  segment.written_at = sequence;
  segment.used_at = calls_;
  members_[member].used_bytes += segment.bytes;
}

uint64_t Directory::setHostBlock(Address base, uint32_t member, uint64_t offset) {
  Segment& segment = segmentAt(base);
  segment.host_member = member;
  return std::exchange(segment.host_block, offset + 1);
}

// --- state

MemoryUse Directory::memoryUse(uint32_t member) const {
  MemoryUse use = memory_;
  use.allocated_bytes = use.peak_bytes = members_[member].used_bytes;
  use.limit_bytes = members_[member].limit();
  use.memory_bytes = members_[member].memory_bytes;
  return use;
}

std::vector<Step> Directory::latestSteps() const {
  std::vector<Step> steps;
  const uint64_t count = std::min<uint64_t>(logged_, kLogSteps);
  for (uint64_t i = logged_ - count; i < logged_; ++i) steps.push_back(log_[i % kLogSteps]);
  return steps;
}

}  // namespace shoal::client
