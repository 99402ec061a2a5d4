#include "client/directory/lazy_copies.h"

#include <doctest/doctest.h>

#include <map>
#include <random>
#include <set>

namespace shoal::client {
namespace {

using wire::Address;

// Segments of two devices, without a directory around them.
struct World {
  Address segment(int member, uint64_t bytes = 100) {
    const Address base = segments.add(bytes, member);
    Segment& segment = segments.at(base);
    segment.live = true;
    segment.home = static_cast<int8_t>(member);
    segment.bound = segment.valid = bitOf(static_cast<uint32_t>(member));
    return base;
  }
  SegmentTable segments{1};
  std::vector<MemberState> members{2};
  LazyCopies copies{segments, members};
};

}  // namespace

TEST_CASE("lazy copies: only whole segments of two devices can be copied later") {
  World world;
  const Address from = world.segment(0);
  const Address to = world.segment(1);
  CHECK(world.copies.possible(to, from));
  CHECK_FALSE(world.copies.possible(to, to));
  CHECK_FALSE(world.copies.possible(to, 0));
  CHECK_FALSE(world.copies.possible(0, from));
  CHECK_FALSE(world.copies.possible(world.segment(0), from));      // the same device
  CHECK_FALSE(world.copies.possible(world.segment(1, 99), from));  // another size
  Segment& source = world.segments.at(from);
  source.shared = true;
  CHECK_FALSE(world.copies.possible(to, from));
  source.shared = false;
  source.pinned = -1;  // of the whole lease
  CHECK_FALSE(world.copies.possible(to, from));
}

TEST_CASE("lazy copies: the first use of a target makes its copy") {
  World world;
  const Address from = world.segment(0);
  const Address to = world.segment(1);
  world.copies.add(to, from);
  CHECK(world.segments.at(to).awaitsCopy());
  CHECK(world.segments.at(to).valid == 0);
  CHECK(world.segments.at(from).copied_later);
  const Step step = world.copies.stepTo(to);
  CHECK(step.kind == Step::Kind::kFetch);
  CHECK(step.target == to);
  CHECK(step.source == from);
  CHECK(step.from == 0);
  CHECK(step.to == 1);
  world.copies.cancel(to);  // as the directory does when the step was carried out
  CHECK_FALSE(world.segments.at(to).awaitsCopy());
  CHECK(world.segments.at(to).valid == bitOf(1));
  CHECK_FALSE(world.segments.at(from).copied_later);
  CHECK_FALSE(world.copies.flushStep(from));
}

TEST_CASE("lazy copies: a source that is released passes its bytes on") {
  World world;
  const Address from = world.segment(0);
  const Address near = world.segment(1);
  const Address far = world.segment(1);
  world.copies.add(near, from);
  world.copies.add(far, from);
  std::set<Address> made;
  while (const Step step = world.copies.releaseStep(from)) {
    REQUIRE(step.kind == Step::Kind::kFetch);
    CHECK(made.insert(step.target).second);
    world.copies.cancel(step.target);
  }
  CHECK(made == std::set{near, far});
}

TEST_CASE("lazy copies: a lost device raises where its bytes are used, and only there") {
  World world;
  const Address from = world.segment(0);
  const Address to = world.segment(1);
  world.copies.add(to, from);
  world.members[0].usable = false;
  CHECK(world.copies.stepTo(to).reason == Step::Reason::kLost);
  CHECK(world.copies.stepTo(to).to == 0);
  CHECK_FALSE(world.copies.releaseStep(from));  // the release goes on without the copy
  CHECK(world.segments.at(to).awaitsCopy());
  CHECK(world.copies.stepTo(to).to == 0);  // a use of the target still names the lost device
  CHECK_FALSE(world.segments.at(from).copied_later);

  World other;
  const Address source = other.segment(0);
  const Address target = other.segment(1);
  other.copies.add(target, source);
  other.members[1].usable = false;
  CHECK_FALSE(other.copies.flushStep(source));  // a target on a lost device needs no copy
  CHECK_FALSE(other.segments.at(target).awaitsCopy());
}

TEST_CASE("lazy copies: another copy of the source replaces a lost one") {
  World world;
  const Address from = world.segment(0);
  const Address to = world.segment(1);
  world.copies.add(to, from);
  world.segments.at(from).bound |= bitOf(1);
  world.segments.at(from).valid |= bitOf(1);
  world.members[0].usable = false;
  const Step step = world.copies.stepTo(to);
  CHECK(step.kind == Step::Kind::kFetch);
  CHECK(step.from == 1);
  CHECK(world.segments.at(from).home == 1);
}

TEST_CASE("lazy copies: flags and lists agree whatever happens") {
  for (uint32_t seed = 0; seed < 100; ++seed) {
    std::mt19937 random(seed);
    World world;
    std::vector<Address> all;
    for (int i = 0; i < 8; ++i) all.push_back(world.segment(i % 2));
    std::map<Address, Address> copy_of;  // by target
    const auto any = [&] { return all[random() % all.size()]; };
    const auto forget = [&](Address source) {
      std::erase_if(copy_of, [&](const auto& entry) { return entry.second == source; });
    };
    for (int i = 0; i < 300; ++i) {
      const Address base = any();
      switch (random() % 3) {
        case 0: {
          const Address to = any();
          // A pending target has no bytes to give, and a pending source must not change.
          if (!world.copies.possible(to, base) || copy_of.count(base) || copy_of.count(to)) break;
          if (world.segments.at(to).copied_later) break;
          world.copies.add(to, base);
          copy_of[to] = base;
          break;
        }
        case 1:
          if (copy_of.erase(base) == 1) world.copies.cancel(base);
          break;
        default:
          while (const Step step = world.copies.flushStep(base)) {
            CHECK(copy_of.at(step.target) == base);
            world.copies.cancel(step.target);
          }
          forget(base);
      }
      for (const Address segment : all) {
        REQUIRE(world.copies.violation(segment) == "");
        CHECK(world.segments.at(segment).awaitsCopy() == (copy_of.count(segment) == 1));
      }
    }
  }
}

TEST_CASE("lazy copies: flags that disagree with the lists are found") {
  World world;
  const Address from = world.segment(0);
  const Address to = world.segment(1);
  world.copies.add(to, from);
  CHECK(world.copies.violation(from) == "");
  world.segments.at(from).copied_later = false;
  CHECK(world.copies.violation(from) == "has a wrong flag of lazy copies");
  world.segments.at(from).copied_later = true;
  world.segments.at(to).bytes = 1;
  CHECK(world.copies.violation(from) == "has a lazy copy of another size");
  world.segments.at(to).copy_of = 0;
  CHECK(world.copies.violation(from) == "lists a foreign copy");
  const Address stray = world.segment(1);
  world.segments.at(stray).copy_of = from;
  CHECK(world.copies.violation(stray) == "waits for a lazy copy that its source does not list");
}

}  // namespace shoal::client
