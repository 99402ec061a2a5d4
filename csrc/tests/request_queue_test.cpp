#include "client/member/request_queue.h"

#include <doctest/doctest.h>

#include <mutex>
#include <vector>

#include "wire/limits.h"

namespace shoal::client {
namespace {

// A queue and the worker's end of its ring.
struct Pair {
  // The next message; empty if there is none.
  std::vector<uint64_t> next() {
    std::vector<uint64_t> message;
    if (!worker.poll(message)) message.clear();
    return message;
  }
  wire::Kind nextKind() { return static_cast<wire::Kind>(wire::headerKind(next().at(0))); }

  memory::SharedMemory region =
      memory::SharedMemory::create("test", transport::ringRegionBytes(wire::kRingBytes));
  Liveness liveness{1, 0, "cpu", /*socket=*/-1, nullptr};
  Traffic traffic;
  RequestQueue queue{region, liveness, traffic};
  transport::RingConsumer worker{region.data(), wire::kRingBytes, wire::kMessageBytesMax,
                                 [] { FAIL("the queue is gone"); }};
  std::mutex mutex;
  Lock held{mutex};
};

}  // namespace

TEST_CASE("request queue: messages arrive in the order of their numbers") {
  Pair pair;
  for (uint64_t i = 1; i <= 1000; ++i) {
    CHECK(pair.queue.post(wire::Allocate{i, 10 * i}, pair.held) == i);
    CHECK(pair.queue.lastSequence() == i);
    const std::vector<uint64_t> message = pair.next();
    REQUIRE(message.size() == 3);
    CHECK(wire::headerBytes(message[0]) == 24);
    CHECK(message[1] == i);
    CHECK(message[2] == 10 * i);
  }
  CHECK(pair.traffic.messages == 1000);
  CHECK(pair.traffic.stream_bytes == 24000);
}

TEST_CASE("request queue: frees wait for the next message, but not for long") {
  Pair pair;
  pair.queue.free(5, /*now=*/false, pair.held);
  pair.queue.free(6, /*now=*/false, pair.held);
  CHECK(pair.next().empty());
  CHECK(pair.queue.post(wire::Sync{}, pair.held) == 2);  // the frees are message 1
  const std::vector<uint64_t> frees = pair.next();
  REQUIRE(frees.size() == 3);
  CHECK(static_cast<wire::Kind>(wire::headerKind(frees[0])) == wire::Kind::kFree);
  CHECK(frees[1] == 5);
  CHECK(frees[2] == 6);
  CHECK(pair.nextKind() == wire::Kind::kSync);

  pair.queue.free(7, /*now=*/true, pair.held);
  CHECK(pair.next().at(1) == 7);

  for (int i = 0; i < 1000; ++i) pair.queue.free(8, /*now=*/false, pair.held);
  size_t freed = 0;
  for (auto message = pair.next(); !message.empty(); message = pair.next()) {
    freed += message.size() - 1;
  }
  CHECK(freed > 1000 - 64);
}

TEST_CASE("request queue: the next number counts frees that are not sent") {
  Pair pair;
  pair.queue.free(5, /*now=*/false, pair.held);
  const uint64_t next = pair.queue.nextSequence(pair.held);
  CHECK(pair.queue.post(wire::Sync{}, pair.held) == next);
}

TEST_CASE("request queue: a message has the line that was noted, unless it needs none") {
  Pair pair;
  CallLines::set(42);
  const uint64_t named = pair.queue.post(wire::Sync{}, pair.held);
  const uint64_t unnamed = pair.queue.post(wire::Allocate{1, 1}, pair.held);
  CallLines::set(0);
  CHECK(pair.queue.lineOf(named, pair.held) == 42);
  CHECK(pair.queue.lineOf(unnamed, pair.held) == 0);
  CHECK(pair.queue.lineOf(named + 100, pair.held) == 0);  // not sent yet
}

TEST_CASE("request queue: a half-full ring has room, and a message over the limit is refused") {
  Pair pair;
  pair.queue.awaitRoom();  // an empty ring has room
  std::vector<uint64_t> many(wire::kMessageBytesMax / 8 - 1, 1);
  const wire::Free large{many};
  for (size_t i = 0; i < wire::kRingBytes / wire::kMessageBytesMax / 2; ++i) {
    pair.queue.post(large, pair.held);
  }
  pair.queue.awaitRoom();  // and so has one that is half full
  std::vector<uint64_t> too_many(wire::kMessageBytesMax / 8, 1);
  CHECK_THROWS(pair.queue.post(wire::Free{too_many}, pair.held));
}

}  // namespace shoal::client
