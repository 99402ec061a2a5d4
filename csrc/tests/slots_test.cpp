#include "client/directory/slots.h"

#include <doctest/doctest.h>

#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace shoal::client {

TEST_CASE("slots: runs never overlap, and a free run of the same length serves again") {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    Slots slots;
    std::set<uint32_t> used;
    std::vector<std::pair<uint32_t, uint64_t>> runs;
    std::map<uint64_t, uint64_t> free;  // by length: runs that were given back
    for (int i = 0; i < 500; ++i) {
      if (random() % 3 != 0 || runs.empty()) {
        const uint64_t count = random() % 2 == 0 ? 1 : random() % 5 + 1;
        const uint32_t end = slots.end();
        const uint32_t slot = slots.take(count);
        REQUIRE(slot > 0);
        REQUIRE(slot + count <= slots.end());
        for (uint32_t k = 0; k < count; ++k) CHECK(used.insert(slot + k).second);
        if (free[count] > 0) {
          CHECK(slots.end() == end);
          --free[count];
        } else {
          CHECK(slots.end() == end + count);
        }
        runs.emplace_back(slot, count);
      } else {
        std::swap(runs[random() % runs.size()], runs.back());
        const auto [slot, count] = runs.back();
        runs.pop_back();
        for (uint32_t k = 0; k < count; ++k) used.erase(slot + k);
        slots.give(slot, count);
        ++free[count];
      }
    }
  }
}

TEST_CASE("slots: none is left after the last one, until one is given back") {
  Slots slots;
  CHECK(slots.take(wire::kSlotsMax) == 0);  // slot 0 is never used
  CHECK(slots.take(wire::kSlotsMax - 2) == 1);
  CHECK(slots.take(2) == 0);
  CHECK(slots.take(1) == wire::kSlotsMax - 1);
  CHECK(slots.take(1) == 0);
  CHECK(slots.end() == wire::kSlotsMax);
  slots.give(wire::kSlotsMax - 1, 1);
  CHECK(slots.take(1) == wire::kSlotsMax - 1);
}

}  // namespace shoal::client
