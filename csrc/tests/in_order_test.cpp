#include "network/in_order.h"

#include <doctest/doctest.h>

#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

using shoal::network::ConnectionLost;
using shoal::network::Order;

TEST_CASE("order: a step runs at once if nothing is expected") {
  Order order(1000);
  bool ran = false;
  order.then(10, [&] { ran = true; });
  CHECK(ran);
  CHECK(order.quiet());
}

TEST_CASE("order: steps wait for what is expected before them, and for nothing after") {
  Order order(1000);
  std::string ran;
  const uint64_t first = order.expect();
  order.then(0, [&] { ran += 'a'; });
  const uint64_t second = order.expect();
  order.then(0, [&] { ran += 'b'; });
  CHECK_FALSE(order.quiet());
  order.arrived(second);
  CHECK(ran.empty());
  order.arrived(first);
  CHECK(ran == "ab");
  CHECK(order.quiet());
}

TEST_CASE("order: of steps that say the same, the latest is kept") {
  Order order(1000);
  std::string ran;
  const uint64_t ticket = order.expect();
  order.thenLatest([&] { ran += '1'; });
  order.thenLatest([&] { ran += '2'; });
  order.then(0, [&] { ran += 'a'; });
  order.thenLatest([&] { ran += '3'; });
  order.arrived(ticket);
  CHECK(ran == "2a3");
}

TEST_CASE("order: the stream waits while too many bytes are held") {
  Order order(100);
  std::atomic<int> ran = 0;
  const uint64_t ticket = order.expect();
  order.then(200, [&] { ++ran; });  // more than the bound: the next one waits
  std::atomic<bool> added = false;
  std::thread stream([&] {
    order.then(0, [&] { ++ran; });
    added = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK_FALSE(added);
  order.arrived(ticket);
  stream.join();
  CHECK(ran == 2);
}

TEST_CASE("order: small steps without bytes are bounded, too") {
  Order order(10000);
  order.expect();
  std::atomic<int> added = 0;
  std::atomic<bool> lost = false;
  std::thread stream([&] {
    try {
      while (true) {
        order.then(0, [] {});
        ++added;
      }
    } catch (const ConnectionLost&) {
      lost = true;
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  order.stop();
  stream.join();
  CHECK(lost);
  CHECK(added < 10000);
}

TEST_CASE("order: whatever the order of arrival, steps run in the order of the stream") {
  for (unsigned seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    Order order(1 << 20);
    std::vector<int> ran;
    std::vector<uint64_t> expected;
    int steps = 0;
    for (int i = 0; i < 60; ++i) {
      const auto choice = random() % 3;
      if (choice == 0) {
        expected.push_back(order.expect());
      } else if (choice == 1) {
        order.then(random() % 100, [&ran, step = steps++] { ran.push_back(step); });
      } else if (!expected.empty()) {
        std::swap(expected[random() % expected.size()], expected.back());
        order.arrived(expected.back());
        expected.pop_back();
      }
      REQUIRE(order.quiet() == expected.empty());
    }
    for (const uint64_t ticket : expected) order.arrived(ticket);
    REQUIRE(ran.size() == static_cast<size_t>(steps));
    for (int step = 0; step < steps; ++step) REQUIRE(ran[static_cast<size_t>(step)] == step);
  }
}
