#include "client/directory/segment_table.h"

#include <doctest/doctest.h>

#include <map>
#include <random>

namespace shoal::client {

using wire::Address;

TEST_CASE("segment table: an address finds its segment, however the table grows") {
  std::mt19937 random(1);
  SegmentTable table(7);
  std::map<Address, uint64_t> live;
  for (int i = 0; i < 5000; ++i) {
    if (random() % 4 != 0 || live.empty()) {
      // Some segments are larger than a slot.
      const uint64_t bytes = random() % 8 == 0 ? wire::kSlotBytes + i : 100 + i;
      const Address base = table.add(bytes, static_cast<int>(random() % 3) - 1);
      REQUIRE(base != 0);
      CHECK(wire::sessionOf(base) == 7);
      CHECK_FALSE(table.known(base));
      table.at(base).live = true;
      CHECK(live.emplace(base, bytes).second);
    } else {
      const Address base = live.begin()->first;
      table.remove(base);
      CHECK_FALSE(table.known(base));
      live.erase(base);
    }
  }
  for (const auto& [base, bytes] : live) {
    CHECK(table.known(base));
    CHECK(table.at(base).bytes == bytes);
    CHECK(table.addressOf(wire::slotOf(base)) == base);
  }
  size_t seen = 0;
  table.each([&](Address base, const Segment& segment) {
    REQUIRE(live.count(base) == 1);
    CHECK(live[base] == segment.bytes);
    ++seen;
  });
  CHECK(seen == live.size());
  CHECK_FALSE(table.known(wire::makeAddress(7, wire::kSlotsMax - 1)));
}

TEST_CASE("segment table: a slot that is used again holds nothing of the segment before") {
  SegmentTable table(1);
  const Address first = table.add(100, 2);
  table.at(first).live = table.at(first).shared = true;
  table.at(first).bound = 5;
  table.remove(first);
  const Address second = table.add(200, -1);
  CHECK(second == first);
  CHECK_FALSE(table.at(second).live);
  CHECK_FALSE(table.at(second).shared);
  CHECK(table.at(second).bound == 0);
  CHECK(table.at(second).pinned == -1);
  CHECK(table.at(second).home == -1);
}

}  // namespace shoal::client
