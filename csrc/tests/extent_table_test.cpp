#include "client/directory/extent_table.h"

#include <doctest/doctest.h>

#include <map>
#include <random>

#include "client/directory/directory.h"

namespace shoal::client {
namespace {

using wire::Address;

// Extents of `count` new segments of a directory, in order.
Extents mintExtents(Directory& directory, size_t count, std::mt19937& random) {
  Extents extents;
  uint64_t start = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t bytes = random() % 1000 + 1;
    extents.push_back({directory.mint(bytes, -1), start, bytes});
    start += bytes;
  }
  return extents;
}

}  // namespace

TEST_CASE("extent table: a sharded segment is the sum of its extents") {
  Directory directory(1);
  directory.addMember(1000, 0);
  directory.addMember(1000, 0);
  const Address a = directory.mint(300, -1);
  const Address b = directory.mint(500, -1);
  const Address whole = directory.extents().join({{a, 0, 300}, {b, 300, 500}}, -1);
  CHECK(directory.violation() == "");
  CHECK(directory.extents().of(whole)->size() == 2);
  CHECK(directory.at(b).extent_of == whole);
  CHECK(directory.bringStep(whole, 0).reason == Step::Reason::kSharded);
  CHECK_FALSE(directory.segments().known(whole));
  CHECK_FALSE(directory.copies().possible(whole, a));
  CHECK_FALSE(directory.copies().possible(a, whole));
  CHECK(directory.memory().use().allocated_bytes == 800);
  const Extents extents = directory.extents().split(whole);
  CHECK(extents[1].base == b);
  CHECK(directory.at(b).extent_of == 0);
  CHECK(directory.extents().of(whole) == nullptr);
  for (const Extent& extent : extents) directory.released(extent.base);
  CHECK(directory.memory().liveSegments() == 0);
}

TEST_CASE("extent table: joins and splits leave every segment as it was") {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    Directory directory(1);
    directory.addMember(1 << 20, 0);
    directory.addMember(1 << 20, 0);
    std::map<Address, Extents> sharded;
    for (int i = 0; i < 200; ++i) {
      if (random() % 2 == 0 || sharded.empty()) {
        const Extents extents = mintExtents(directory, random() % 5 + 1, random);
        const Address base = directory.extents().join(extents, -1);
        REQUIRE(base != 0);
        CHECK(sharded.emplace(base, extents).second);
      } else {
        const auto [base, expected] = *sharded.begin();
        const Extents extents = directory.extents().split(base);
        REQUIRE(extents.size() == expected.size());
        for (size_t k = 0; k < extents.size(); ++k) {
          CHECK(extents[k].base == expected[k].base);
          directory.released(extents[k].base);
        }
        sharded.erase(base);
      }
      REQUIRE(directory.violation() == "");
      for (const auto& [base, extents] : sharded) {
        REQUIRE(directory.extents().of(base) != nullptr);
        CHECK(directory.extents().of(base)->size() == extents.size());
        CHECK(directory.extents().of(extents[0].base) == nullptr);
      }
    }
  }
}

TEST_CASE("extent table: a gap, a freed extent and a foreign one are found") {
  SegmentTable segments(1);
  ExtentTable table(segments);
  const Address a = segments.add(100, -1);
  const Address b = segments.add(200, -1);
  segments.at(a).live = segments.at(b).live = true;
  const Address whole = table.join({{a, 0, 100}, {b, 100, 200}}, -1);
  const std::string name =
      "the sharded segment in slot " + std::to_string(wire::slotOf(whole)) + " ";
  CHECK(table.violation() == "");
  segments.at(b).live = false;
  CHECK(table.violation() == name + "has an extent that was freed");
  segments.at(b).live = true;
  segments.at(b).extent_of = a;
  CHECK(table.violation() == name + "has an extent that does not name it");
  segments.at(b).extent_of = whole;
  segments.at(b).bytes = 199;
  CHECK(table.violation() == name + "has gaps");
  segments.at(b).bytes = 200;
  segments.at(whole).bytes = 301;
  CHECK(table.violation() == name + "is not covered by its extents");
  segments.at(whole).bytes = 300;
  segments.at(whole).live = true;
  CHECK(table.violation() == name + "counts as an ordinary one");
}

}  // namespace shoal::client
