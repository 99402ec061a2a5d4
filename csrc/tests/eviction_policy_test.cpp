#include "worker/paging/eviction_policy.h"

#include <doctest/doctest.h>

#include <deque>
#include <random>
#include <set>
#include <vector>

using shoal::worker::EvictionPolicy;
using shoal::worker::PagedSegment;
using shoal::worker::UpcomingUses;

namespace {

const auto any = [](const PagedSegment&) { return true; };

struct Device {
  UpcomingUses upcoming;
  EvictionPolicy policy;
  std::deque<PagedSegment> segments;

  explicit Device(bool least_recent = false, uint64_t limit_bytes = 3200)
      : policy({limit_bytes, least_recent}) {
    policy.setUpcoming(&upcoming);
  }
  PagedSegment& add(uint32_t slot, uint64_t bytes = 10) {
    PagedSegment& segment = segments.emplace_back();
    segment.slot = slot;
    segment.bytes = bytes;
    segment.used_at = policy.now();
    policy.enter(segment);
    return segment;
  }
  void foresee(uint64_t sequence, uint32_t slot, bool frees = false) {
    upcoming.setEnd(sequence);
    upcoming.add(slot, frees);
    upcoming.setEnd(sequence + 1);
  }
};

}  // namespace

TEST_CASE("policy: the segment whose use is furthest ahead leaves") {
  Device device;
  device.add(1);
  PagedSegment& far = device.add(2);
  device.add(3);
  device.policy.setNow(1);
  device.foresee(2, 1);
  device.foresee(3, 3);
  device.foresee(5, 2);
  CHECK(device.policy.victim(-1.0, any) == &far);
  CHECK(device.policy.victim(3.9, any) == &far);
  CHECK(device.policy.victim(4.0, any) == nullptr);
}

TEST_CASE("policy: a segment without a known use leaves before one with") {
  Device device;
  device.add(1);
  PagedSegment& unknown = device.add(2);
  device.policy.setNow(1);
  device.foresee(1000000, 1);
  CHECK(device.policy.victim(-1.0, any) == &unknown);
}

TEST_CASE("policy: a segment that the stream frees leaves first, and is dead") {
  Device device;
  device.add(1);
  PagedSegment& freed = device.add(2);
  device.policy.setNow(1);
  device.foresee(2, 2, /*frees=*/true);
  CHECK(device.policy.isDead(freed));
  CHECK(device.policy.victim(-1.0, any) == &freed);
}

TEST_CASE("policy: the message that runs keeps its segments") {
  Device device;
  PagedSegment& used = device.add(1);
  device.policy.setNow(4);
  device.policy.use(used);
  CHECK(device.policy.victim(-1.0, any) == nullptr);
  device.policy.setNow(5);
  CHECK(device.policy.victim(-1.0, any) == &used);
}

TEST_CASE("policy: segments that cannot leave stay") {
  Device device;
  device.add(1);
  PagedSegment& other = device.add(2);
  device.policy.setNow(1);
  device.foresee(2, 2);
  const auto only = [&](const PagedSegment& segment) { return &segment == &other; };
  CHECK(device.policy.victim(-1.0, only) == &other);
}

TEST_CASE("policy: a segment with a copy leaves at half the distance") {
  Device device;
  PagedSegment& copied = device.add(1);
  PagedSegment& changed = device.add(2);
  copied.copied = true;
  device.policy.setNow(1);
  device.foresee(5, 1);
  device.foresee(8, 2);
  CHECK(device.policy.victim(-1.0, any) == &copied);  // 2 * 4 messages, against 7
  copied.copied = false;
  CHECK(device.policy.victim(-1.0, any) == &changed);
}

TEST_CASE("policy: it learns the gaps of a loop") {
  Device device;
  PagedSegment& segment = device.add(1);
  // Used twice in a loop of ten messages: gaps of 3 and 7.
  for (uint64_t loop = 1; loop <= 4; ++loop) {
    for (const uint64_t at : {10 * loop, 10 * loop + 3}) {
      device.policy.setNow(at);
      device.policy.use(segment);
    }
  }
  device.policy.setNow(44);
  device.upcoming.setEnd(44);
  CHECK(device.policy.distance(segment) == 50 - 44 + 1);
}

TEST_CASE("policy: a learned use inside the window did not come, so it is at its end") {
  Device device;
  PagedSegment& segment = device.add(1);
  for (const uint64_t at : {2, 4, 6}) {
    device.policy.setNow(at);
    device.policy.use(segment);
  }
  device.policy.setNow(7);
  device.upcoming.setEnd(30);
  CHECK(device.policy.distance(segment) == 30 - 7 + 1);
}

TEST_CASE("policy: least recently used, where that is asked for") {
  Device device(/*least_recent=*/true);
  std::vector<PagedSegment*> order;
  for (uint32_t slot = 1; slot < 5; ++slot) order.push_back(&device.add(slot));
  uint64_t now = 0;
  for (const size_t i : {2, 0, 3, 1}) {
    device.policy.setNow(++now);
    device.policy.use(*order[i]);
  }
  device.foresee(now + 2, 3);  // it does not look
  device.policy.setNow(now + 1);
  for (const size_t i : {2, 0, 3, 1}) {
    PagedSegment* victim = device.policy.victim(-1.0, any);
    CHECK(victim == order[i]);
    device.policy.leave(*victim);
  }
}

TEST_CASE("policy: the reserve is copied, the furthest segment first, until it is full") {
  Device device(false, /*limit_bytes=*/32 * 25);  // a reserve of 25 bytes
  std::vector<PagedSegment*> order;
  for (uint32_t slot = 1; slot < 6; ++slot) order.push_back(&device.add(slot));
  device.policy.setNow(1);
  for (uint32_t slot = 1; slot < 6; ++slot) device.foresee(2 + slot, slot);
  CHECK(device.policy.nextCopy(25, any) == nullptr);  // so much is free
  for (const size_t i : {4, 3, 2}) {
    PagedSegment* next = device.policy.nextCopy(0, any);
    CHECK(next == order[i]);
    next->copied = true;
  }
  CHECK(device.policy.nextCopy(0, any) == nullptr);
}

TEST_CASE("policy: what needs no copy is part of the reserve") {
  Device device(false, 32 * 25);
  device.add(1).in_place = true;
  device.add(2);
  PagedSegment& third = device.add(3);
  device.policy.setNow(1);
  device.foresee(2, 2, /*frees=*/true);
  device.foresee(9, 3);
  device.foresee(10, 1);
  CHECK(device.policy.nextCopy(0, any) == &third);
  CHECK(device.policy.nextCopy(5, any) == nullptr);
}

TEST_CASE("policy: the next segment in swap space is prefetched a few messages early") {
  Device device;
  PagedSegment& soon = device.add(1);
  PagedSegment& later = device.add(2);
  device.add(3);
  device.policy.setNow(1);
  device.foresee(2, 3);
  device.foresee(4, 1);
  device.foresee(8, 2);
  CHECK(device.policy.nextPrefetch().segment == nullptr);  // all are here
  device.policy.leave(later);
  device.policy.leave(soon);
  CHECK(device.policy.nextPrefetch().segment == &soon);
  CHECK(device.policy.nextPrefetch().further_than == 2 * 3.0);
  device.policy.enter(soon);
  CHECK(device.policy.nextPrefetch().segment == nullptr);  // seven messages ahead
  device.policy.setNow(2);
  CHECK(device.policy.nextPrefetch().segment == &later);
}

TEST_CASE("policy: a segment that is only freed is not prefetched") {
  Device device;
  PagedSegment& segment = device.add(1);
  device.policy.setNow(1);
  device.policy.leave(segment);
  device.foresee(2, 1, /*frees=*/true);
  CHECK(device.policy.nextPrefetch().segment == nullptr);
}

TEST_CASE("policy: the set of resident segments is kept, whatever comes and goes") {
  std::mt19937 random(3);
  Device device;
  for (uint32_t slot = 1; slot <= 30; ++slot) device.add(slot);
  std::set<PagedSegment*> resident;
  for (PagedSegment& segment : device.segments) resident.insert(&segment);
  for (int step = 0; step < 2000; ++step) {
    PagedSegment& segment = device.segments[random() % 30];
    if (resident.erase(&segment) == 0) {
      device.policy.enter(segment);
      resident.insert(&segment);
    } else if (random() % 2 == 0) {
      device.policy.leave(segment);
    } else {
      device.policy.forget(segment);
    }
    const auto& kept = device.policy.resident();
    REQUIRE(std::set<PagedSegment*>(kept.begin(), kept.end()) == resident);
    REQUIRE(kept.size() == resident.size());
    for (size_t i = 0; i < kept.size(); ++i) REQUIRE(kept[i]->index == i);
  }
}
