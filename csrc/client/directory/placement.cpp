// Which member runs a call, and how it gets room there.
#include <algorithm>

#include "client/directory/directory.h"

namespace shoal::client {

using wire::Address;

namespace {

constexpr uint64_t kSlackDivisor = 16;  // of a member's memory, freed beyond what is needed at once
// A byte without room costs as much as this many bytes that are fetched: it displaces another one,
// which has to come back.
constexpr uint64_t kShortageCost = 4;
constexpr int kNowhereShift = 16;  // a byte that does not even fit in swap space costs the most

uint64_t left(uint64_t limit, uint64_t used) {
  return used < limit ? limit - used : 0;
}

}  // namespace

uint64_t Directory::roomOf(uint32_t member) const {
  return left(members_[member].memory_bytes, members_[member].used_bytes);
}

uint64_t Directory::spaceOf(uint32_t member) const {
  return left(members_[member].limit(), members_[member].used_bytes);
}

int Directory::place(std::span<const SegmentUse> uses, uint64_t made_bytes) {
  ++calls_;
  uint64_t largest = 0;
  uint32_t preferred = 0;
  int shared = -1;
  for (const SegmentUse& use : uses) {
    Segment& segment = segmentAt(use.base);
    segment.used_at = calls_;
    if (segment.shared) shared = segment.home;
    if (segment.home >= 0 && segment.bytes > largest) {
      largest = segment.bytes;
      preferred = static_cast<uint32_t>(segment.home);
    }
  }
  if (shared >= 0) return shared;
  int best = -1;
  uint64_t least = UINT64_MAX;
  for (size_t i = 0; i <= members_.size(); ++i) {  // the preferred one first: it wins a tie
    const uint32_t member = i == 0 ? preferred : static_cast<uint32_t>(i - 1);
    if (!members_[member].usable) continue;
    uint64_t missing = 0;
    uint64_t unbound = 0;
    for (const SegmentUse& use : uses) {
      const Segment& segment = at(use.base);
      if (segment.bound == 0) {
        unbound += segment.bytes;
      } else if ((segment.valid & bit(member)) == 0) {
        missing += segment.bytes;
      }
    }
    const uint64_t needed = missing + unbound + made_bytes;
    const uint64_t room = roomOf(member);
    uint64_t cost = missing + (needed > room ? (needed - room) * kShortageCost : 0);
    const uint64_t space = spaceOf(member);
    if (needed > space) cost += (needed - space) << kNowhereShift;
    const bool more_space = best >= 0 && space > spaceOf(static_cast<uint32_t>(best));
    if (cost < least || (cost == least && needed > room && more_space)) {
      least = cost;
      best = static_cast<int>(member);
    }
  }
  return best;
}

std::vector<uint32_t> Directory::leastUsed(uint32_t member) const {
  std::vector<uint32_t> found;
  for (uint32_t slot = 1; slot < next_slot_; ++slot) {
    const Segment& segment = segments_[slot];
    if (segment.live && (segment.bound & bit(member)) != 0 && segment.used_at < calls_) {
      found.push_back(slot);
    }
  }
  std::sort(found.begin(), found.end(),
            [this](uint32_t a, uint32_t b) { return segments_[a].used_at < segments_[b].used_at; });
  return found;
}

uint32_t Directory::usableMask() const {
  uint32_t mask = 0;
  for (uint32_t member = 0; member < members_.size(); ++member) {
    if (members_[member].usable) mask |= bit(member);
  }
  return mask;
}

int Directory::emptiest(uint32_t but, uint64_t bytes) const {
  int best = -1;
  for (uint32_t member = 0; member < members_.size(); ++member) {
    if (member == but || !members_[member].usable || roomOf(member) < bytes) continue;
    if (best < 0 || roomOf(member) > roomOf(static_cast<uint32_t>(best))) {
      best = static_cast<int>(member);
    }
  }
  return best;
}

// --- room for a call

RoomSearch::RoomSearch(Directory& directory, uint32_t member, std::span<const SegmentUse> uses,
                       uint64_t made_bytes)
    : directory_(directory), member_(member), needed_bytes_(made_bytes) {
  for (const SegmentUse& use : uses) {
    const Segment& segment = directory.at(use.base);
    if ((segment.bound & Directory::bit(member)) == 0) needed_bytes_ += segment.bytes;
  }
  if (needed_bytes_ <= directory.roomOf(member)) return;
  goal_bytes_ = needed_bytes_ + directory.members_[member].memory_bytes / kSlackDivisor;
  phase_ = Phase::kOwnReplicas;
  lookForReplicas(member);
}

Step RoomSearch::next() {
  if (phase_ == Phase::kOwnReplicas) {
    if (const Step step = dropReplica(goal_bytes_)) return step;
    phase_ = Phase::kMove;
    if (directory_.roomOf(member_) >= needed_bytes_) phase_ = Phase::kDone;
    if (phase_ == Phase::kMove) movable_ = directory_.leastUsed(member_);
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
  replicas_ = directory_.leastUsed(member);
  next_replica_ = 0;
}

// A copy whose original is on another member costs nothing to drop.
Step RoomSearch::dropReplica(uint64_t goal_bytes) {
  while (next_replica_ < replicas_.size() && directory_.roomOf(replicas_on_) < goal_bytes) {
    const uint32_t slot = replicas_[next_replica_++];
    const Segment& segment = directory_.segments_[slot];
    if (segment.home == static_cast<int>(replicas_on_)) continue;
    const Address base = wire::makeAddress(directory_.session_, slot);
    return directory_.dropStep(base, ~Directory::bit(replicas_on_));
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
    if (directory_.roomOf(member_) >= goal_bytes_) break;
    const uint32_t slot = movable_[next_movable_];
    Segment& segment = directory_.segments_[slot];
    if (segment.pinned >= 0 || segment.shared) continue;
    const Address base = wire::makeAddress(directory_.session_, slot);
    const uint32_t elsewhere = segment.valid & directory_.usableMask() & ~Directory::bit(member_);
    const int peer =
        elsewhere != 0 ? __builtin_ctz(elsewhere) : directory_.emptiest(member_, segment.bytes);
    if (peer < 0 && !dropped_all_) {
      dropped_all_ = true;
      phase_ = Phase::kAllReplicas;
      lookForReplicas(0);
      return {};
    }
    if (peer < 0) continue;
    if (elsewhere == 0) return directory_.fetchStep(base, static_cast<uint32_t>(peer));
    directory_.moveHome(segment, static_cast<uint32_t>(peer));
    ++next_movable_;
    return directory_.dropStep(base, ~Directory::bit(member_));
  }
  phase_ = Phase::kDone;
  return {};
}

}  // namespace shoal::client
