#include "client/member/call_cache.h"

#include <doctest/doctest.h>

#include <map>
#include <random>
#include <vector>

using shoal::client::CachedCall;
using shoal::client::CallCache;

namespace {

struct Key {
  const void* op;
  std::vector<uint64_t> words;
  bool operator<(const Key& other) const {
    return std::tie(op, words) < std::tie(other.op, other.words);
  }
};

CachedCall* find(CallCache& cache, const Key& key) {
  const uint64_t hash = CallCache::hash(key.op, key.words.data(), key.words.size());
  return cache.find(hash, key.op, key.words.data(), key.words.size());
}

CachedCall* insert(CallCache& cache, const Key& key) {
  const uint64_t hash = CallCache::hash(key.op, key.words.data(), key.words.size());
  return cache.insert(hash, key.op, key.words.data(), key.words.size());
}

}  // namespace

TEST_CASE("call cache: a call is found by its operator and all of its words") {
  CallCache cache;
  const int ops[2] = {};
  CachedCall* call = insert(cache, {&ops[0], {1, 2, 3}});
  CHECK(call->id == 0);
  CHECK(find(cache, {&ops[0], {1, 2, 3}}) == call);
  CHECK(find(cache, {&ops[1], {1, 2, 3}}) == nullptr);
  CHECK(find(cache, {&ops[0], {1, 2}}) == nullptr);
  CHECK(find(cache, {&ops[0], {1, 2, 4}}) == nullptr);
}

TEST_CASE("call cache: equal hashes are not equal calls") {
  CallCache cache;
  const int op = 0;
  const uint64_t a[] = {1}, b[] = {2};
  CachedCall* first = cache.insert(7, &op, a, 1);
  CHECK(cache.find(7, &op, b, 1) == nullptr);
  CachedCall* second = cache.insert(7, &op, b, 1);
  CHECK(cache.find(7, &op, a, 1) == first);
  CHECK(cache.find(7, &op, b, 1) == second);
}

TEST_CASE("call cache: a call stays where it is while others come") {
  CallCache cache;
  const int op = 0;
  CachedCall* first = insert(cache, {&op, {0}});
  for (uint64_t i = 1; i < 1000; ++i) insert(cache, {&op, {i}});
  CHECK(find(cache, {&op, {0}}) == first);
}

TEST_CASE("call cache: it is full before the worker's bounds are reached, and empty when cleared") {
  const int op = 0;
  CallCache many;
  uint64_t count = 0;
  while (!many.full()) insert(many, {&op, {count++}});
  CHECK(count == shoal::wire::kPreparedMax);
  CallCache large;
  const std::vector<uint64_t> words(100000);
  size_t total = 0;
  for (count = 0; !large.full(); ++count) {
    Key key{&op, words};
    key.words[0] = count;
    insert(large, key);
    total += words.size();
  }
  CHECK(total < shoal::wire::kPreparedWordsMax);
  large.clear();
  CHECK(large.size() == 0);
  CHECK_FALSE(large.full());
  CHECK(find(large, {&op, words}) == nullptr);
}

TEST_CASE("call cache: it agrees with a map") {
  std::mt19937 random(1);
  const int ops[3] = {};
  CallCache cache;
  std::map<Key, CachedCall*> known;
  for (int step = 0; step < 5000; ++step) {
    Key key{&ops[random() % 3], {}};
    for (size_t i = random() % 4; i > 0; --i) key.words.push_back(random() % 8);
    const auto found = known.find(key);
    REQUIRE(find(cache, key) == (found == known.end() ? nullptr : found->second));
    if (found != known.end()) continue;
    known[key] = insert(cache, key);
    REQUIRE(known[key]->id + 1 == known.size());
  }
}
