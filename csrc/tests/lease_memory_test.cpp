#include "client/directory/lease_memory.h"

#include <doctest/doctest.h>

namespace shoal::client {

TEST_CASE("lease memory: shortages name the device or the whole lease") {
  LeaseMemory memory;
  memory.addMember(1000, 100);
  memory.addMember(1000, 0);
  CHECK(memory.fits(2100, -1));
  CHECK_FALSE(memory.fits(2101, -1));
  CHECK(memory.shortage(-1).whole_lease);
  CHECK(memory.shortage(-1).limit_bytes == 2100);
  CHECK_FALSE(memory.fits(1001, 1));
  CHECK(memory.shortage(1).member == 1);
  CHECK(memory.shortage(1).limit_bytes == 1000);
}

TEST_CASE("lease memory: a pinned segment counts on its device and in the lease") {
  LeaseMemory memory;
  memory.addMember(1000, 0);
  memory.addMember(1000, 0);
  memory.minted(600, 1);
  CHECK_FALSE(memory.fits(500, 1));
  CHECK(memory.fits(500, 0));
  CHECK(memory.shortage(1).used_bytes == 600);
  memory.minted(900, -1);
  CHECK_FALSE(memory.fits(600, 0));  // the device has room, but the lease does not
  memory.released(600, 1);
  CHECK(memory.fits(600, 1));
  CHECK(memory.use().allocated_bytes == 900);
  CHECK(memory.use().peak_bytes == 1500);
  CHECK(memory.use().allocations == 2);
  CHECK(memory.use().frees == 1);
  CHECK(memory.liveSegments() == 1);
  memory.resetPeak();
  CHECK(memory.use().peak_bytes == 900);
}

TEST_CASE("lease memory: room is device memory, space is swap space too") {
  LeaseMemory memory;
  memory.addMember(1000, 500);
  memory.bound(0, 400);
  CHECK(memory.roomOf(0) == 600);
  CHECK(memory.spaceOf(0) == 1100);
  memory.bound(0, 800);
  CHECK(memory.roomOf(0) == 0);
  CHECK(memory.spaceOf(0) == 300);
  memory.bound(0, 800);
  CHECK(memory.spaceOf(0) == 0);  // more than there is leaves no room, and no huge number
  memory.unbound(0, 2000);
  CHECK(memory.use(0).allocated_bytes == 0);
  CHECK(memory.use(0).limit_bytes == 1500);
}

TEST_CASE("lease memory: one device without swap space keeps segments whole") {
  LeaseMemory alone;
  alone.addMember(1000, 0);
  CHECK(alone.wholeBytesMax() == UINT64_MAX);
  LeaseMemory swaps;
  swaps.addMember(1000, 1);
  CHECK(swaps.wholeBytesMax() == 500);
  LeaseMemory two;
  two.addMember(1000, 0);
  two.addMember(4000, 0);
  CHECK(two.wholeBytesMax() == 2000);
  CHECK(two.largestMemoryBytes() == 4000);
}

TEST_CASE("lease memory: sums that differ from the segments are found") {
  SegmentTable segments(1);
  const wire::Address base = segments.add(100, 0);
  segments.at(base).live = true;
  segments.at(base).bound = 1;
  const auto violation = [&](uint64_t minted, int pinned, uint64_t bound) {
    LeaseMemory memory;
    memory.addMember(1000, 0);
    if (minted > 0) memory.minted(minted, pinned);
    memory.bound(0, bound);
    return memory.violation(segments);
  };
  CHECK(violation(100, 0, 100) == "");
  CHECK(violation(0, 0, 100) == "the count of live segments is wrong");
  CHECK(violation(99, 0, 100) == "the sum of allocated bytes is wrong");
  CHECK(violation(100, -1, 100) == "member 0 has a wrong pinned sum");
  CHECK(violation(100, 0, 99) == "member 0 has a wrong sum of used bytes");
}

}  // namespace shoal::client
