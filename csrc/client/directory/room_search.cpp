#include "client/directory/room_search.h"

#include <algorithm>

namespace shoal::client {

using wire::Address;

namespace {

constexpr uint64_t kSlackDivisor = 16;  // of a member's memory, freed beyond what is needed at once

}  // namespace

RoomSearch::RoomSearch(Directory& directory, uint32_t member, std::span<const SegmentUse> uses,
                       uint64_t made_bytes)
    : directory_(directory), member_(member), needed_bytes_(made_bytes) {
  for (const SegmentUse& use : uses) {
    const Segment& segment = directory.at(use.base);
    if ((segment.bound & bitOf(member)) == 0) needed_bytes_ += segment.bytes;
  }
  if (needed_bytes_ <= roomOf(member)) return;
  goal_bytes_ = needed_bytes_ + directory.memory_.memoryBytes(member) / kSlackDivisor;
  phase_ = Phase::kOwnReplicas;
  lookForReplicas(member);
}

Step RoomSearch::next() {
  if (phase_ == Phase::kOwnReplicas) {
    if (const Step step = dropReplica(goal_bytes_)) return step;
    phase_ = Phase::kMove;
    if (roomOf(member_) >= needed_bytes_) phase_ = Phase::kDone;
    if (phase_ == Phase::kMove) movable_ = leastUsed(member_);
  }
  while (phase_ != Phase::kDone) {
    if (phase_ == Phase::kAllReplicas) {
      if (const Step step = dropAllReplicas()) return step;
      phase_ = Phase::kMove;
    }
    if (const Step step = moveAway()) return step;
  }
  return {};
}

void RoomSearch::lookForReplicas(uint32_t member) {
  replicas_on_ = member;
  replicas_ = leastUsed(member);
  next_replica_ = 0;
}

// A copy whose original is on another member costs nothing to drop. Where that member is lost, the
// copy is the original.
Step RoomSearch::dropReplica(uint64_t goal_bytes) {
  while (next_replica_ < replicas_.size() && roomOf(replicas_on_) < goal_bytes) {
    const Address base = replicas_[next_replica_++];
    promote(directory_.segments_.at(base), directory_.members_);
    if (directory_.at(base).home == static_cast<int>(replicas_on_)) continue;
    return directory_.dropStep(base, ~bitOf(replicas_on_));
  }
  return {};
}

Step RoomSearch::dropAllReplicas() {
  for (;;) {
    if (const Step step = dropReplica(UINT64_MAX)) return step;
    if (replicas_on_ + 1 == directory_.members_.size()) return {};
    lookForReplicas(replicas_on_ + 1);
  }
}

// Moves the least recently used segment to the member with the most room: a fetch there, then a
// free here.
Step RoomSearch::moveAway() {
  for (; next_movable_ < movable_.size(); ++next_movable_) {
    if (roomOf(member_) >= goal_bytes_) break;
    const Address base = movable_[next_movable_];
    Segment& segment = directory_.segments_.at(base);
    if (segment.pinned >= 0 || segment.shared) continue;
    const uint32_t elsewhere = segment.valid & usableMask() & ~bitOf(member_);
    const int peer = elsewhere != 0 ? __builtin_ctz(elsewhere) : emptiest(segment.bytes);
    if (peer < 0 && !dropped_all_) {
      dropped_all_ = true;
      phase_ = Phase::kAllReplicas;
      lookForReplicas(0);
      return {};
    }
    if (peer < 0) continue;
    if (elsewhere == 0) return directory_.fetchStep(base, static_cast<uint32_t>(peer));
    moveHome(segment, static_cast<uint32_t>(peer), directory_.members_);
    ++next_movable_;
    return directory_.dropStep(base, ~bitOf(member_));
  }
  phase_ = Phase::kDone;
  return {};
}

std::vector<Address> RoomSearch::leastUsed(uint32_t member) const {
  std::vector<Address> found;
  directory_.segments_.each([&](Address base, const Segment& segment) {
    const bool bound = (segment.bound & bitOf(member)) != 0;
    if (bound && segment.used_at < directory_.calls_) found.push_back(base);
  });
  std::sort(found.begin(), found.end(), [this](Address a, Address b) {
    return directory_.at(a).used_at < directory_.at(b).used_at;
  });
  return found;
}

uint32_t RoomSearch::usableMask() const {
  uint32_t mask = 0;
  for (uint32_t member = 0; member < directory_.members_.size(); ++member) {
    if (directory_.members_[member].usable) mask |= bitOf(member);
  }
  return mask;
}

int RoomSearch::emptiest(uint64_t bytes) const {
  int best = -1;
  for (uint32_t member = 0; member < directory_.members_.size(); ++member) {
    if (member == member_ || !directory_.members_[member].usable || roomOf(member) < bytes)
      continue;
    if (best < 0 || roomOf(member) > roomOf(static_cast<uint32_t>(best))) {
      best = static_cast<int>(member);
    }
  }
  return best;
}

}  // namespace shoal::client
