#include "transport/ring.h"

#include <doctest/doctest.h>

#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "wire/message.h"

namespace shoal::transport {
namespace {

constexpr size_t kBytes = 256;  // of the ring: messages meet its end often

// Both ends of a ring, in memory of this process.
struct Ends {
  static void alive() {}
  void put(uint64_t number, size_t words) {
    uint64_t* message = producer.reserve(words * 8);
    message[0] = wire::headerWord(wire::Kind::kFree, static_cast<uint32_t>(words * 8), 0);
    for (size_t i = 1; i < words; ++i) message[i] = number;
    producer.commit(words * 8);
  }

  alignas(64) std::byte region[sizeof(RingControl) + kBytes] = {};
  RingProducer producer{region, kBytes, alive};
  RingConsumer consumer{region, kBytes, /*message_bytes_max=*/128, alive};
};

}  // namespace

TEST_CASE("ring: messages of two threads' ring arrive whole and in order") {
  constexpr uint64_t kMessages = 20000;
  Ends ends;
  std::thread other([&] {
    for (uint64_t i = 0; i < kMessages; ++i) ends.put(i, 2 + i % 13);
  });
  std::vector<uint64_t> message;
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < kMessages; ++i) {
    while (!ends.consumer.poll(message)) ends.consumer.wait(/*spin_us=*/100, /*timeout_ms=*/50);
    wrong += message.size() != 2 + i % 13 || message.back() != i;
  }
  other.join();
  CHECK(wrong == 0);
  CHECK_FALSE(ends.consumer.poll(message));
}

TEST_CASE("ring: the consumer looks at the tail again only when it has taken what it saw") {
  Ends ends;
  ends.put(1, 2);
  ends.put(2, 2);
  std::vector<uint64_t> message;
  REQUIRE(ends.consumer.poll(message));
  reinterpret_cast<RingControl*>(ends.region)->tail = 3;  // not the end of any message
  REQUIRE(ends.consumer.poll(message));
  CHECK(message.back() == 2);
  CHECK_THROWS_AS(ends.consumer.poll(message), std::length_error);
}

}  // namespace shoal::transport
