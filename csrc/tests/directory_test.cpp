// The directory against a model of members' memories: whatever happens, a message that brings a
// segment first reads the bytes that the program wrote last.
#include "client/directory/directory.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "client/directory/room_search.h"

namespace shoal::client {
namespace {

using wire::Address;

constexpr uint64_t kMemoryBytes = 4096;

// A lease without workers: it carries the directory's steps out on maps, as a session does by
// messages.
class Model {
 public:
  explicit Model(uint32_t members, uint32_t seed) : directory(7), random(seed) {
    memories.resize(members);
    sequences.resize(members, 0);
    usable.resize(members, true);
    for (uint32_t i = 0; i < members; ++i) directory.addMember(kMemoryBytes, kMemoryBytes);
  }

  Address mint(uint64_t bytes, int pinned) {
    if (!directory.memory().fits(bytes, pinned)) return 0;
    const Address base = directory.mint(bytes, pinned);
    truth[base] = std::nullopt;
    return base;
  }

  // Makes a sharded segment of these two, unless one of them is in another already.
  void join(Address first, Address second) {
    if (first == second) return;
    const Segment &a = directory.at(first), &b = directory.at(second);
    if (a.extent_of != 0 || b.extent_of != 0 || a.pinned != b.pinned) return;
    const Extents extents{{first, 0, a.bytes}, {second, a.bytes, b.bytes}};
    const Address whole = directory.extents().join(extents, a.pinned);
    REQUIRE(whole != 0);
    CHECK(truth.count(whole) == 0);
    CHECK(directory.at(whole).bytes == a.bytes + b.bytes);
    CHECK_FALSE(directory.copies().possible(whole, first));
    check();
  }

  void release(Address base) {
    if (const Address whole = directory.at(base).extent_of; whole != 0) {
      for (const Extent& extent : directory.extents().split(whole)) {
        CHECK(truth.count(extent.base) == 1);
        CHECK(directory.at(extent.base).extent_of == 0);
      }
      CHECK(directory.extents().of(whole) == nullptr);
    }
    note();
    while (const Step step = directory.copies().releaseStep(base)) {
      if (carryOut(step)) continue;
      // Only a lost device makes such a step fail.
      if (usable[step.to] && usable[step.from]) lose(random() % 2 == 0 ? step.to : step.from);
      directory.copies().lose(step.target, usable[step.from]);
    }
    while (const Step step = directory.dropStep(base, 0)) drop(step);
    directory.released(base);
    truth.erase(base);
    check();
  }

  // Whether the segment's present bytes are on the member.
  bool bring(Address base, uint32_t member) {
    for (;;) {
      note();
      const Step step = directory.bringStep(base, member);
      if (!step) return true;
      if (!carryOut(step)) return false;
      check();
    }
  }

  bool flush(Address base) {
    for (;;) {
      note();
      const Step step = directory.copies().flushStep(base);
      if (!step) return true;
      if (!carryOut(step)) return false;
      check();
    }
  }

  void read(Address base, uint32_t member) {
    if (!usable[member]) return;
    const bool brought = bring(base, member);
    if (fail_every == 0 && truth[base].has_value()) CHECK(brought);  // some copy is left
    if (!brought) return;
    REQUIRE(memories[member].count(base) == 1);
    if (truth[base].has_value()) CHECK(memories[member][base] == *truth[base]);
  }

  void write(Address base, uint32_t member) {
    if (!usable[member] || !flush(base) || !bring(base, member)) return;
    memories[member][base] = ++values;
    truth[base] = values;
    while (const Step step = directory.dropStep(base, uint32_t{1} << member)) drop(step);
    directory.wrote(base, member, ++sequences[member]);
    check();
  }

  void copyLater(Address to, Address from) {
    note();
    if (!directory.copies().possible(to, from)) return;
    const auto source = static_cast<uint32_t>(directory.at(from).pinned);
    const auto target = static_cast<uint32_t>(directory.at(to).pinned);
    if (!usable[source] || !usable[target] || !bring(from, source) || !flush(to)) return;
    if (directory.at(to).awaitsCopy()) directory.copies().cancel(to);
    directory.copies().add(to, from);
    truth[to] = truth[from];
    check();
  }

  void makeRoom(uint32_t member, const std::vector<SegmentUse>& uses, uint64_t bytes) {
    if (!usable[member]) return;
    note();
    const int placed = directory.place(uses, bytes);
    if (placed >= 0) CHECK(usable[static_cast<size_t>(placed)]);
    RoomSearch search(directory, member, uses, bytes);
    for (size_t steps = 0; search.needed(); ++steps) {
      REQUIRE(steps < 10000);  // a search ends
      note();
      const Step step = search.next();
      if (step.kind == Step::Kind::kFree) {
        for (const SegmentUse& use : uses) CHECK(use.base != step.target);
        drop(step);
      } else if (!carryOut(step)) {
        return;
      }
      check();
    }
  }

  void lose(uint32_t member) {
    usable[member] = false;
    memories[member].clear();
    note();
    for (auto& [base, value] : truth) {
      // Bytes that were nowhere else are gone; so are those of a pending copy of them.
      const Segment& segment = directory.at(base);
      const Address source = segment.copy_of != 0 ? segment.copy_of : base;
      const uint32_t copies = directory.at(source).valid;
      bool left = false;
      for (uint32_t i = 0; i < memories.size(); ++i) left |= usable[i] && (copies >> i & 1) != 0;
      const bool target_lost = segment.awaitsCopy() && !usable[static_cast<size_t>(segment.home)];
      if (!left || target_lost) value = std::nullopt;
    }
  }

  Directory directory;
  std::mt19937 random;
  std::vector<std::map<Address, uint64_t>> memories;  // by member: what it holds
  std::vector<uint64_t> sequences;
  std::vector<bool> usable;
  std::map<Address, std::optional<uint64_t>> truth;  // what the program wrote; empty: anything
  int fail_every = 0;                                // one step in so many fails; 0: none does

 private:
  void note() {
    for (uint32_t i = 0; i < memories.size(); ++i) {
      directory.noteMember(i, usable[i], sequences[i]);
    }
  }

  bool carryOut(const Step& step) {
    if (step.kind == Step::Kind::kNone) return true;
    if (step.kind == Step::Kind::kRaise) return false;
    if (fail_every != 0 && random() % static_cast<uint32_t>(fail_every) == 0) return false;
    REQUIRE(usable[step.to]);
    if (step.kind == Step::Kind::kAllocate) {
      CHECK(memories[step.to].count(step.target) == 0);
      memories[step.to][step.target] = 0;
    } else {
      REQUIRE(step.kind == Step::Kind::kFetch);
      REQUIRE(usable[step.from]);
      CHECK((step.to != step.from || step.target != step.source));
      REQUIRE(memories[step.from].count(step.source) == 1);
      memories[step.to][step.target] = memories[step.from][step.source];
    }
    directory.apply(step, ++sequences[step.to]);
    return true;
  }

  void drop(const Step& step) {
    REQUIRE(step.kind == Step::Kind::kFree);
    if (usable[step.to]) CHECK(memories[step.to].erase(step.target) == 1);
    directory.apply(step, 0);
  }

  void check() { CHECK(directory.violation() == ""); }
  uint64_t values = 0;
};

void run(uint32_t members, uint32_t seed, bool losses, int fail_every) {
  Model model(members, seed);
  model.fail_every = fail_every;
  auto& random = model.random;
  const auto any = [&]() -> Address {
    if (model.truth.empty()) return 0;
    return std::next(model.truth.begin(), static_cast<long>(random() % model.truth.size()))->first;
  };
  for (int i = 0; i < 400; ++i) {
    const Address base = any();
    uint32_t member = random() % members;
    // Calls on shoal:N run there, so the segments of a device are hardly ever used elsewhere.
    const int pinned = base != 0 ? model.directory.at(base).pinned : -1;
    if (pinned >= 0 && random() % 8 != 0) member = static_cast<uint32_t>(pinned);
    switch (random() % 11) {
      case 0:
      case 1:
        model.mint(64 * (random() % 4 + 1), static_cast<int>(random() % (members + 1)) - 1);
        break;
      case 2:
        if (base != 0) model.release(base);
        break;
      case 3:
      case 4:
        if (base != 0) model.read(base, member);
        break;
      case 5:
      case 6:
        if (base != 0) model.write(base, member);
        break;
      case 7:
        if (base != 0) model.copyLater(base, any());
        break;
      case 8:
        model.makeRoom(
            member, base != 0 ? std::vector<SegmentUse>{{base, false}} : std::vector<SegmentUse>{},
            random() % kMemoryBytes);
        break;
      case 10:
        if (base != 0) model.join(base, any());
        break;
      default:
        if (losses && i > 200 && random() % 20 == 0) model.lose(member);
    }
    if (i % 16 == 0) REQUIRE(model.directory.violation() == "");
  }
  while (!model.truth.empty()) model.release(model.truth.begin()->first);
  CHECK(model.directory.memory().liveSegments() == 0);
  CHECK(model.directory.memory().use().allocated_bytes == 0);
  for (uint32_t i = 0; i < members; ++i) {
    CHECK(model.directory.memory().use(i).allocated_bytes == 0);
    CHECK(model.memories[i].empty());
  }
}

}  // namespace

TEST_CASE("every read finds the bytes that were written last") {
  for (uint32_t seed = 0; seed < 200; ++seed) run(seed % 4 + 1, seed, false, 0);
}

TEST_CASE("steps that fail leave a directory that claims nothing false") {
  for (uint32_t seed = 0; seed < 200; ++seed) run(seed % 4 + 1, seed, false, 5);
}

TEST_CASE("lost members take their bytes along and nothing else") {
  for (uint32_t seed = 0; seed < 600; ++seed) run(seed % 3 + 2, seed, true, seed % 2 == 0 ? 0 : 7);
}

TEST_CASE("a copy on a member that is left takes the place of a lost home") {
  Model model(3, 1);
  const Address base = model.mint(100, -1);
  model.write(base, 2);
  model.read(base, 0);
  model.read(base, 1);
  model.lose(0);
  model.lose(2);
  model.read(base, 1);
  CHECK(model.directory.home(base) == 1);
}

TEST_CASE("a call runs where most of its bytes are") {
  Model model(3, 1);
  const Address small = model.mint(100, -1);
  const Address large = model.mint(1000, -1);
  model.write(small, 0);
  model.write(large, 2);
  CHECK(model.directory.place(std::vector<SegmentUse>{{small, false}, {large, false}}, 0) == 2);
}

TEST_CASE("the log keeps the latest steps in order") {
  Model model(2, 1);
  const Address base = model.mint(10, -1);
  for (int i = 0; i < 300; ++i) model.write(base, static_cast<uint32_t>(i) % 2);
  const std::vector<Step> steps = model.directory.log().latest();
  CHECK(steps.size() == 256);
  CHECK(steps.back().kind == Step::Kind::kFree);
  CHECK(steps[steps.size() - 2].kind == Step::Kind::kFetch);
}

}  // namespace shoal::client
