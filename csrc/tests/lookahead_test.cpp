#include "worker/paging/lookahead.h"

#include <doctest/doctest.h>

#include <vector>

#include "memory/shared_memory.h"
#include "wire/address.h"
#include "wire/message.h"

using namespace shoal;
using wire::Kind;
using worker::Lookahead;
using worker::UpcomingUses;

namespace {

constexpr size_t kCapacity = 1 << 16;

uint64_t at(uint32_t slot) {
  return wire::makeAddress(1, slot);
}

// A ring whose two ends are here. Call 7 has addresses in words 0 and 2 of its immediates.
struct Stream {
  memory::SharedMemory region =
      memory::SharedMemory::create("test-ring", transport::ringRegionBytes(kCapacity));
  transport::RingProducer producer{region.data(), kCapacity, [] {}};
  transport::RingConsumer consumer{region.data(), kCapacity, kCapacity / 2, [] {}};
  std::vector<uint32_t> words{0, 2};
  Lookahead lookahead{consumer, [this](uint32_t id) { return id == 7 ? &words : nullptr; }};
  uint64_t sequence = 0;

  void post(Kind kind, std::vector<uint64_t> body, uint16_t flags = 0) {
    const size_t bytes = (body.size() + 1) * 8;
    uint64_t* words = producer.reserve(bytes);
    words[0] = wire::headerWord(kind, static_cast<uint32_t>(bytes), flags);
    std::copy(body.begin(), body.end(), words + 1);
    producer.commit(bytes);
  }
  // The next message runs.
  const UpcomingUses& run() {
    std::vector<uint64_t> message;
    REQUIRE(consumer.poll(message));
    lookahead.advance(++sequence);
    return lookahead.uses();
  }
};

}  // namespace

TEST_CASE("look-ahead: the next use of a segment is found in the ring") {
  Stream stream;
  stream.post(Kind::kSync, {});
  stream.post(Kind::kRead, {at(3), 8});
  stream.post(Kind::kCall, {wire::pair(7, 0), at(4), 99, at(5)});
  stream.post(Kind::kFree, {at(3), at(4)});
  const UpcomingUses& uses = stream.run();
  CHECK(uses.end() == 5);
  CHECK(uses.next(3)->sequence == 2);
  CHECK_FALSE(uses.next(3)->frees);
  CHECK(uses.next(4)->sequence == 3);
  CHECK(uses.next(5)->sequence == 3);
  CHECK(uses.next(6) == nullptr);
  REQUIRE(uses.order().size() == 5);
  CHECK(uses.order().front() == std::pair<uint64_t, uint32_t>{2, 3});
}

TEST_CASE("look-ahead: messages that ran are forgotten") {
  Stream stream;
  for (int i = 0; i < 3; ++i) stream.post(Kind::kRead, {at(3), 8});
  stream.post(Kind::kFree, {at(3)});
  stream.run();
  CHECK(stream.run().next(3)->sequence == 2);  // the one that runs is not past
  CHECK(stream.run().next(3)->sequence == 3);
  CHECK(stream.run().next(3)->frees);
  stream.post(Kind::kSync, {});
  CHECK(stream.run().next(3) == nullptr);
}

TEST_CASE("look-ahead: a segment is dead once it is only freed") {
  Stream stream;
  stream.post(Kind::kSync, {});
  stream.post(Kind::kRead, {at(3), 8});
  stream.post(Kind::kFree, {at(3), at(4)});
  const UpcomingUses& uses = stream.run();
  CHECK_FALSE(uses.isDead(3, 2));
  CHECK(uses.isDead(4, 2));
  CHECK_FALSE(uses.isDead(5, 2));
}

TEST_CASE("look-ahead: nothing is dead behind a message whose uses are not known") {
  const std::vector<std::pair<Kind, std::vector<uint64_t>>> blind{
      {Kind::kCall, {wire::pair(8, 0), at(3)}},  // call 8 is not prepared
      {Kind::kBackward, {8, wire::pair(0, 0)}},
  };
  for (const auto& [kind, body] : blind) {
    Stream stream;
    stream.post(Kind::kSync, {});
    stream.post(Kind::kSync, {});
    stream.post(kind, body);
    stream.post(Kind::kFree, {at(3)});
    const UpcomingUses& uses = stream.run();
    CHECK_FALSE(uses.isDead(3, 2));
    CHECK_FALSE(uses.isDead(3, 3));
    CHECK(uses.isDead(3, 4));
  }
}

TEST_CASE("look-ahead: nothing is dead because of messages that it did not see") {
  Stream stream;
  stream.post(Kind::kSync, {});
  stream.post(Kind::kFree, {at(3)});
  const UpcomingUses& uses = stream.run();
  CHECK_FALSE(uses.isDead(3, 1));  // the message that runs may use it
  CHECK(uses.isDead(3, 2));
}

TEST_CASE("look-ahead: short and nonsensical messages are no uses") {
  Stream stream;
  stream.post(Kind::kSync, {});
  stream.post(Kind::kCall, {});
  stream.post(Kind::kCall, {wire::pair(7, 0), 0});
  stream.post(Kind::kRead, {});
  stream.post(Kind::kFree, {});
  stream.post(static_cast<Kind>(999), {at(3)});
  const UpcomingUses& uses = stream.run();
  CHECK(uses.end() == 7);
  CHECK(uses.order().empty());
}

TEST_CASE("look-ahead: a client that is not ahead is followed") {
  Stream stream;
  for (int i = 0; i < 2000; ++i) {  // several times around the ring
    stream.post(Kind::kRead, {at(3), 8, 0, 0, 0, 0, 0, 0});
    const UpcomingUses& uses = stream.run();
    CHECK(uses.end() == stream.sequence + 1);
    CHECK(uses.order().empty());
  }
}
