#include "client/directory/directory.h"

namespace shoal::client {

using wire::Address;

void Directory::addMember(uint64_t memory_bytes, uint64_t spill_bytes) {
  memory_.addMember(memory_bytes, spill_bytes);
  members_.emplace_back();
}

Address Directory::mint(uint64_t bytes, int pinned) {
  const Address base = segments_.add(bytes, pinned);
  if (base == 0) return 0;
  segments_.at(base).live = true;
  memory_.minted(bytes, pinned);
  return base;
}

void Directory::released(Address base) {
  memory_.released(at(base).bytes, at(base).pinned);
  segments_.remove(base);
}

// --- steps

int Directory::home(Address base) {
  Segment& segment = segments_.at(base);
  if (segment.home >= 0) promote(segment, members_);
  return segment.home;
}

Step Directory::bringStep(Address base, uint32_t member) {
  const Segment& segment = at(base);
  if ((segment.valid & bitOf(member)) != 0) return {};
  if (!segment.live) return {Step::Kind::kRaise, Step::Reason::kSharded};
  if (segment.shared) {
    return {Step::Kind::kRaise, Step::Reason::kShared, static_cast<uint8_t>(segment.home)};
  }
  if (segment.awaitsCopy()) return copies_.stepTo(base);
  if (segment.bound != 0) return fetchStep(base, member);
  return {Step::Kind::kAllocate, Step::Reason::kNone, static_cast<uint8_t>(member), 0, base};
}

Step Directory::fetchStep(Address base, uint32_t to) {
  Segment& segment = segments_.at(base);
  promote(segment, members_);
  const auto from = static_cast<uint8_t>(segment.home);
  if (!members_[from].usable) return {Step::Kind::kRaise, Step::Reason::kLost, from};
  return {Step::Kind::kFetch, Step::Reason::kNone, static_cast<uint8_t>(to), from, base, base};
}

// The home goes last, so that it always has the bytes.
Step Directory::dropOneOf(uint32_t members, Address base) const {
  const Segment& segment = at(base);
  const uint32_t replicas = segment.home < 0 ? members : members & ~bitOf(segment.home);
  const auto member = static_cast<uint8_t>(__builtin_ctz(replicas != 0 ? replicas : members));
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
  Segment& segment = segments_.at(step.target);
  switch (step.kind) {
    case Step::Kind::kAllocate:
      made(step.target, step.to, sequence);
      break;
    case Step::Kind::kFetch:
      if (step.target == step.source) {
        segment.bound |= bitOf(step.to);
        segment.valid |= bitOf(step.to);
        memory_.bound(step.to, segment.bytes);
      } else {
        copies_.cancel(step.target);
        wrote(step.target, step.to, sequence);
      }
      break;
    case Step::Kind::kFree:
      segment.bound &= ~bitOf(step.to);
      segment.valid &= ~bitOf(step.to);
      memory_.unbound(step.to, segment.bytes);
      if (step.host_block != 0) segment.host_block = 0;
      break;
    case Step::Kind::kNone:
    case Step::Kind::kRaise:
      return;
  }
  log_.add(step);
}

uint64_t Directory::setHostBlock(Address base, uint32_t member, uint64_t offset) {
  Segment& segment = segments_.at(base);
  segment.host_member = member;
  return std::exchange(segment.host_block, offset + 1);
}

}  // namespace shoal::client
