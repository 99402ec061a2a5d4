// Finds the steps that give a call room on a member, by moving what was not used for long.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "client/directory/directory.h"

namespace shoal::client {

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
  uint64_t roomOf(uint32_t member) const { return directory_.memory_.roomOf(member); }
  // Segments on a member that the present call does not use, the least recently used first.
  std::vector<wire::Address> leastUsed(uint32_t member) const;
  uint32_t usableMask() const;
  // The member with the most room, if it has room for `bytes`; -1: none has.
  int emptiest(uint64_t bytes) const;

  Directory& directory_;
  uint32_t member_;
  uint64_t needed_bytes_ = 0, goal_bytes_ = 0;
  Phase phase_ = Phase::kDone;
  bool dropped_all_ = false;
  uint32_t replicas_on_ = 0;             // the member that `replicas_` are of
  std::vector<wire::Address> replicas_;  // that may be replicas, from `next_replica_` on
  size_t next_replica_ = 0;
  std::vector<wire::Address> movable_;  // from `member_`, from `next_movable_` on
  size_t next_movable_ = 0;
};

}  // namespace shoal::client
