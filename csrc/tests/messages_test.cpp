// Every message: what is written is read again, and nothing shorter or longer is accepted.
#include "wire/messages.h"

#include <doctest/doctest.h>

#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "network/frames.h"
#include "wire/templates.h"

namespace shoal {
namespace {

using wire::Words;

constexpr uint64_t kList[] = {0x1111, 0x2222, 0x3333};
constexpr char kText[] = "eleven text";

// Fills every field with something that no other field has.
struct Filler {
  uint64_t next = 1;
  template <typename T>
  void word(const char*, T& value, wire::Rule rule = {}) {
    if (value == T{}) value = static_cast<T>(std::min(next++, rule.limit));
  }
  void halves(const char*, uint32_t& low, const char*, uint32_t& high, wire::Rule = {}) {
    if (low == 0) low = static_cast<uint32_t>(next++);
    if (high == 0) high = static_cast<uint32_t>(next++);
  }
  void list(const char*, Words& words, uint64_t, wire::Rule = {}) {
    words = Words(kList).first(1 + next++ % 3);
  }
  void bytes(const char*, std::string_view& data, uint64_t, wire::Rule) {
    data = std::string_view(kText).substr(0, 3 + next++ % 8);
  }
  uint64_t left(uint64_t) { return 0; }
};

template <typename M>
M filled(uint16_t flags = 0) {
  M message{};
  if constexpr (requires { message.flags; }) message.flags = flags;
  Filler filler;
  message.layout(filler);
  return message;
}
// The text's and the name's lengths must add up.
template <>
wire::ErrorReply filled<wire::ErrorReply>(uint16_t) {
  return {7, 9, 6, 5, std::string_view(kText)};
}

template <typename M>
bool refused(Words body, uint16_t flags) {
  try {
    wire::readBody<M>(body, flags);
  } catch (const wire::ProtocolError&) {
    return true;
  }
  return false;
}

// Lists to the end of a message have no length of their own: a shorter one is another message.
template <typename M>
constexpr bool kOpenEnd = std::is_same_v<M, wire::Free> || std::is_same_v<M, wire::Call> ||
                          std::is_same_v<M, wire::Reply> || std::is_same_v<M, wire::DataReply>;

template <typename M>
void checkRoundTrip(uint16_t flags = 0) {
  const M message = filled<M>(flags);
  const std::vector<uint64_t> words = wire::body(message);
  CHECK(words.size() == wire::wordsOf(message));
  CHECK(wire::body(wire::readBody<M>(words, flags)) == words);
  for (size_t count = 0; count < words.size(); ++count) {
    // Exactly so many words on the heap: the sanitizers see a read behind them.
    const std::vector<uint64_t> shorter(words.begin(), words.begin() + static_cast<long>(count));
    if (!kOpenEnd<M>) {
      CHECK(refused<M>(shorter, flags));
    } else if (!refused<M>(shorter, flags)) {
      CHECK(wire::body(wire::readBody<M>(shorter, flags)) == shorter);
    }
  }
  std::vector<uint64_t> longer = words;
  longer.push_back(0);
  if (!kOpenEnd<M>) CHECK(refused<M>(longer, flags));
}

// Words that any bytes may be: a reader ends with a value or a ProtocolError.
template <typename M>
void checkNoise(uint16_t flags) {
  const uint64_t values[] = {0, 1, 2, 255, 4096, UINT32_MAX, uint64_t{1} << 32, ~uint64_t{0}};
  uint64_t state = 12345;
  for (int run = 0; run < 2000; ++run) {
    std::vector<uint64_t> words(run % 9);
    for (uint64_t& word : words) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      word = values[state >> 61];
    }
    if (!refused<M>(words, flags)) CHECK(wire::body(wire::readBody<M>(words, flags)) == words);
  }
}

TEST_CASE("every message is read as it was written, and no truncation of it") {
  size_t kinds = 0;
  wire::Messages::each([&]<typename M>(const M&) {
    CAPTURE(std::string(wire::kKindNames[static_cast<size_t>(M::kKind)]));
    checkRoundTrip<M>();
    ++kinds;
  });
  CHECK(kinds + 1 == wire::kKindsEnd);
  checkRoundTrip<wire::Call>(wire::kFlagRecord | wire::kFlagLearn);
}

TEST_CASE("every frame and reply is read as it was written, and no truncation of it") {
  network::DownFrames::each([]<typename M>(const M&) { checkRoundTrip<M>(); });
  network::ReadFrames::each([]<typename M>(const M&) { checkRoundTrip<M>(); });
  checkRoundTrip<wire::Reply>();
  checkRoundTrip<wire::ErrorReply>();
  checkRoundTrip<wire::DataReply>();
  checkRoundTrip<wire::GeneratorReply>();
  checkRoundTrip<wire::ElapsedReply>();
  checkRoundTrip<wire::StatsReply>();
}

TEST_CASE("a reader takes any words") {
  wire::Messages::each([]<typename M>(const M&) {
    // Bytes may have any padding, which is not read.
    if constexpr (!std::is_same_v<M, wire::Prepare> && !std::is_same_v<M, wire::Write> &&
                  !std::is_same_v<M, wire::GeneratorSet>) {
      checkNoise<M>(0);
      checkNoise<M>(0xffff);
    }
  });
}

TEST_CASE("decode finds the type of a message by its kind") {
  wire::Messages::each([]<typename M>(const M&) {
    std::vector<uint64_t> whole;
    wire::append(whole, filled<M>());
    CHECK(wire::headerBytes(whole[0]) == whole.size() * 8);
    bool found = false;
    CHECK(wire::Messages::decode(whole, [&]<typename Seen>(const Seen& seen) {
      found = std::is_same_v<Seen, M> && wire::body(seen) == wire::body(filled<M>());
    }));
    CHECK(found);
  });
  const uint64_t unknown[] = {wire::headerWord(wire::kKindsEnd, 8, 0)};
  CHECK(!wire::Messages::decode(unknown, [](const auto&) {}));
  const uint64_t pad[] = {wire::headerWord(wire::Kind::kPad, 8, 0)};
  CHECK(!wire::Messages::decode(pad, [](const auto&) {}));
}

TEST_CASE("the kinds have different names, and so have the frames numbers") {
  std::set<std::string> names;
  for (const char* name : wire::kKindNames) names.insert(name);
  CHECK(names.size() == wire::kKindsEnd);
  const auto above = [](const auto& frame) {
    CHECK(static_cast<uint16_t>(frame.kKind) >= wire::kKindsEnd);
  };
  network::DownFrames::each(above);
  network::ReadFrames::each(above);
}

TEST_CASE("a message names the segments that it uses") {
  using wire::Access;
  std::vector<std::pair<uint64_t, Access>> seen;
  const auto note = [&](wire::Address address, Access access) {
    seen.emplace_back(address, access);
  };
  wire::eachAddress(wire::CopyWithin{1, 2, 3}, note);
  wire::eachAddress(wire::FetchAdd{{.to = 4, .from = 5}, 6}, note);
  wire::eachAddress(wire::Free{Words(kList).first(2)}, note);
  wire::eachAddress(wire::Seed{7, 8}, note);
  wire::eachAddress(wire::Call{0, 1, 0, Words(kList), Words(kList).first(1)}, note);
  const std::vector<std::pair<uint64_t, Access>> expected{
      {1, Access::kWrite},     {2, Access::kRead},      {4, Access::kWrite},
      {0x1111, Access::kFree}, {0x2222, Access::kFree}, {0x1111, Access::kMake}};
  CHECK((seen == expected));
}

TEST_CASE("limits are refused by name") {
  CHECK(refused<wire::Read>(Words({std::vector<uint64_t>{1, wire::kInlineBytesMax + 1}}), 0));
  CHECK(!refused<wire::Read>(Words({std::vector<uint64_t>{1, wire::kInlineBytesMax}}), 0));
  const uint64_t mode[] = {1, 8, 1, 2, 1};
  CHECK(refused<wire::Share>(mode, 0));
  const uint64_t peer[] = {1, uint64_t{1} << 32, 1};
  CHECK(refused<wire::Export>(peer, 0));
  const uint64_t id[] = {wire::kPreparedMax};
  CHECK(refused<wire::Call>(id, 0));
  const uint64_t overflow[] = {7, 0, ~uint64_t{0}, 2, 0};
  CHECK(refused<wire::ErrorReply>(overflow, 0));
}

TEST_CASE("only requests that carry information have a reply") {
  std::set<std::string> replying;
  for (uint16_t kind = 1; kind < wire::kKindsEnd; ++kind) {
    if (wire::expectsReply(static_cast<wire::Kind>(kind), 0)) {
      replying.insert(wire::kKindNames[kind]);
    }
  }
  const std::set<std::string> expected{"read",  "locate", "generator_get", "event_elapsed", "sync",
                                       "stats", "share",  "open",          "unshare"};
  CHECK((replying == expected));
  CHECK(wire::expectsReply(wire::Kind::kCall, wire::kFlagLearn));
}

TEST_CASE("items of a template are read as they were written, and no truncation of them") {
  const std::vector<int64_t> sizes{2, 3}, strides{3, 1};
  std::vector<std::vector<uint64_t>> items(6);
  wire::appendTensor(items[0], 6, wire::kTensorConj, sizes, strides);
  wire::appendValue(items[1], wire::Tag::kInt, 42);
  wire::appendString(items[2], "sum and more");
  wire::appendHostTensor(items[3], 4, 2, "0123456789abcdef", 16);
  wire::appendBool(items[4], true);
  wire::appendTag(items[5], wire::Tag::kComplex);
  const size_t immediates[] = {1, 0, 0, 0, 0, 2};
  for (size_t i = 0; i < items.size(); ++i) {
    for (size_t count = 0; count < items[i].size(); ++count) {
      const std::vector<uint64_t> shorter(items[i].begin(),
                                          items[i].begin() + static_cast<long>(count));
      wire::Reader reader(shorter.data(), shorter.size());
      CHECK_THROWS_AS(wire::ArgumentItem::read(reader), wire::ProtocolError);
    }
    wire::Reader reader(items[i].data(), items[i].size());
    const auto item = wire::ArgumentItem::read(reader);
    reader.finish("item");
    CHECK(item.immediates() == immediates[i]);
    if (i == 0)
      CHECK(std::vector<int64_t>(item.shape.strides.begin(), item.shape.strides.end()) == strides);
    if (i == 1) CHECK(item.value == 42);
    if (i == 2) CHECK(item.data == "sum and more");
    if (i == 3) CHECK(item.data == "0123456789abcdef");
    if (i == 4) CHECK(item.boolean());
  }
  std::vector<uint64_t> output;
  wire::appendOutput(output, wire::OutputKind::kResized, 3, 6, sizes, strides);
  wire::Reader reader(output.data(), output.size());
  const auto item = wire::OutputItem::read(reader);
  CHECK(item.number == 3);
  CHECK(item.dtype == 6);
  CHECK(std::vector<int64_t>(item.shape.sizes.begin(), item.shape.sizes.end()) == sizes);
  const uint64_t many_dimensions[] = {wire::tagWord(wire::Tag::kTensor, 6, 65)};
  wire::Reader bad(many_dimensions, 1);
  CHECK_THROWS_AS(wire::ArgumentItem::read(bad), wire::ProtocolError);
}

}  // namespace
}  // namespace shoal
