// What a lease knows of one segment.
#pragma once

#include <cstdint>
#include <vector>

#include "wire/address.h"

namespace shoal::client {

// Member devices that one lease can have; bits of a 32-bit mask.
inline constexpr uint32_t kMembersMax = 32;

inline constexpr uint32_t bitOf(uint32_t member) {
  return uint32_t{1} << member;
}

struct Segment {
  uint64_t bytes = 0;
  uint64_t host_block = 0;    // offset + 1 of the host block that holds the bytes; 0: none
  uint64_t written_at = 0;    // sequence number on its home
  uint64_t used_at = 0;       // in calls of this lease; kept where there are several members
  uint32_t bound = 0;         // members that have memory for it
  uint32_t valid = 0;         // of these, the members with its present bytes
  uint32_t host_member = 0;   // the member whose copy is the host block
  int8_t home = -1;           // the member that wrote it last
  int8_t pinned = -1;         // the member whose device it belongs to; -1: the whole lease
  bool live = false;          // false: its slot is free, or it is a sharded segment
  bool shared = false;        // in memory that other sessions have too: on its home, and only there
  bool copied_later = false;  // lazy copies of it are pending
  int8_t lost_source = -1;    // the member that was lost with its pending copy's source
  wire::Address extent_of = 0;  // the sharded segment that it belongs to; 0: none
  wire::Address copy_of = 0;    // the source of its pending copy; 0: none
  // It has no bytes until its pending copy is made.
  bool awaitsCopy() const { return copy_of != 0 || lost_source >= 0; }
};

// A segment that a call uses.
struct SegmentUse {
  wire::Address base;
  bool writes;
};

// What the session knows of a member now.
struct MemberState {
  bool usable = true;
  uint64_t last_sequence = 0;
};

// Makes a member with a copy the home.
inline void moveHome(Segment& segment, uint32_t member, const std::vector<MemberState>& members) {
  segment.home = static_cast<int8_t>(member);
  segment.written_at = members[member].last_sequence;  // by then at the latest
}

// Where the home is lost, a member with another copy becomes the home.
inline void promote(Segment& segment, const std::vector<MemberState>& members) {
  if (members[static_cast<size_t>(segment.home)].usable) return;
  for (uint32_t member = 0; member < members.size(); ++member) {
    if (members[member].usable && (segment.valid & bitOf(member)) != 0) {
      return moveHome(segment, member, members);
    }
  }
}

}  // namespace shoal::client
