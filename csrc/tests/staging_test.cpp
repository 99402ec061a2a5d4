#include "network/staging.h"

#include <doctest/doctest.h>

#include <deque>
#include <random>

using shoal::network::Staging;

TEST_CASE("staging: ranges follow each other and stay aligned") {
  Staging staging(1000, 256);
  CHECK(staging.take(10, 1) == 1000);
  CHECK(staging.take(65, 2) == 1064);
  CHECK(staging.take(64, 3) == 1192);
  CHECK_FALSE(staging.take(1, 4).has_value());
}

TEST_CASE("staging: a range larger than the region never fits") {
  Staging staging(0, 256);
  CHECK_FALSE(staging.take(257, 1).has_value());
  CHECK(staging.take(256, 1) == 0);
}

TEST_CASE("staging: a released ticket releases those before it") {
  Staging staging(0, 256);
  CHECK(staging.take(64, 1).has_value());
  CHECK(staging.take(64, 2).has_value());
  CHECK(staging.take(128, 3).has_value());
  CHECK_FALSE(staging.take(64, 4).has_value());
  staging.release(2);
  CHECK(staging.take(64, 4) == 0);
}

TEST_CASE("staging: a range does not wrap around the end") {
  Staging staging(0, 256);
  CHECK(staging.take(128, 1) == 0);
  CHECK(staging.take(64, 2) == 128);
  staging.release(1);
  // 64 bytes are left at the end and 128 at the start: the larger range skips the end.
  CHECK(staging.take(128, 3) == 0);
  CHECK_FALSE(staging.take(1, 4).has_value());
}

TEST_CASE("staging: an empty region starts from its beginning again") {
  Staging staging(0, 256);
  for (uint64_t ticket = 1; ticket < 20; ++ticket) {
    CHECK(staging.take(100, ticket) == 0);
    staging.release(ticket);
  }
}

TEST_CASE("staging: ranges that are held never overlap") {
  struct Range {
    uint64_t start, end, ticket;
  };
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const uint64_t capacity = 64 * (1 + random() % 20);
    Staging staging(4096, capacity);
    std::deque<Range> held;
    uint64_t ticket = 0;
    for (int step = 0; step < 300; ++step) {
      if (random() % 3 > 0) {
        const uint64_t bytes = 1 + random() % capacity;
        const auto start = staging.take(bytes, ++ticket);
        if (!start) {
          if (held.empty()) FAIL("an empty region refuses ", bytes, " of ", capacity);
          continue;
        }
        const Range taken{*start, *start + bytes, ticket};
        REQUIRE(taken.start >= 4096);
        REQUIRE(taken.end <= 4096 + capacity);
        for (const Range& other : held) {
          REQUIRE((taken.end <= other.start || other.end <= taken.start));
        }
        held.push_back(taken);
      } else if (!held.empty()) {
        const uint64_t released = held[random() % held.size()].ticket;
        staging.release(released);
        while (!held.empty() && held.front().ticket <= released) held.pop_front();
      }
    }
  }
}
