#include "memory/block_allocator.h"

#include <doctest/doctest.h>

#include <map>
#include <random>

using shoal::memory::BlockAllocator;

TEST_CASE("blocks: a region without bytes has no block") {
  BlockAllocator blocks(0);
  CHECK_FALSE(blocks.allocate(1).has_value());
  CHECK(blocks.largestFree() == 0);
}

TEST_CASE("blocks: a large block takes whole pages, and its release joins its neighbours") {
  BlockAllocator blocks(1 << 20);
  const auto a = blocks.allocate(20000);
  const auto b = blocks.allocate(20000);
  const auto c = blocks.allocate(20000);
  REQUIRE((a && b && c));
  CHECK(blocks.usedBytes() == 3 * 20480);
  blocks.release(*a);
  blocks.release(*c);
  blocks.release(*b);
  CHECK(blocks.usedBytes() == 0);
  CHECK(blocks.largestFree() == 1 << 20);
  CHECK(blocks.freeRanges().size() == 1);
}

TEST_CASE("blocks: the smallest range that fits serves a large block") {
  BlockAllocator blocks(1 << 20);
  const auto hole = blocks.allocate(32768);
  const auto wall = blocks.allocate(32768);
  REQUIRE((hole && wall));
  blocks.release(*hole);
  CHECK(blocks.allocate(20000) == hole);
}

TEST_CASE("blocks: small blocks of one class share a slab") {
  BlockAllocator blocks(1 << 20);
  const auto first = blocks.allocate(100);
  const auto second = blocks.allocate(128);
  REQUIRE((first && second));
  CHECK(*second == *first + 128);
  CHECK(blocks.usedBytes() == 256);
  blocks.release(*first);
  CHECK(blocks.allocate(100) == first);
}

TEST_CASE("blocks: a block wastes less than a quarter of its bytes") {
  BlockAllocator blocks(8 << 20);
  for (size_t bytes = 512; bytes <= BlockAllocator::kSmallMax; bytes += 37) {
    const auto offset = blocks.allocate(bytes);
    REQUIRE(offset.has_value());
    CHECK(blocks.blockBytes(*offset) >= bytes);
    CHECK(blocks.blockBytes(*offset) * 3 <= bytes * 4);
    blocks.release(*offset);
  }
}

TEST_CASE("blocks: what is handed out never overlaps, and is counted") {
  for (unsigned seed = 0; seed < 60; ++seed) {
    std::mt19937 random(seed);
    const size_t capacity = size_t{1} << (16 + random() % 6);
    BlockAllocator blocks(capacity);
    std::map<size_t, size_t> held;  // bytes by offset
    size_t used = 0;
    for (int step = 0; step < 600; ++step) {
      if (random() % 5 < 3) {
        const size_t bytes = random() % (random() % 2 == 0 ? 2048 : 100000);
        const auto offset = blocks.allocate(bytes);
        if (!offset) continue;
        const size_t block_bytes = blocks.blockBytes(*offset);
        REQUIRE(block_bytes >= bytes);
        REQUIRE(*offset % BlockAllocator::kAlignment == 0);
        REQUIRE(*offset + block_bytes <= blocks.capacity());
        REQUIRE(*offset + block_bytes <= blocks.highWater());
        const auto next = held.lower_bound(*offset);
        if (next != held.end()) REQUIRE(*offset + block_bytes <= next->first);
        if (next != held.begin()) {
          REQUIRE(std::prev(next)->first + std::prev(next)->second <= *offset);
        }
        held[*offset] = block_bytes;
        used += block_bytes;
      } else if (!held.empty()) {
        const auto chosen = std::next(held.begin(), static_cast<int>(random() % held.size()));
        blocks.release(chosen->first);
        used -= chosen->second;
        held.erase(chosen);
      }
      REQUIRE(blocks.usedBytes() == used);
      for (const auto& [offset, bytes] : blocks.freeRanges()) {
        const auto next = held.lower_bound(offset);
        REQUIRE((next == held.end() || offset + bytes <= next->first));
      }
    }
  }
}
