// Codecs: the ways to go over the fields of a message. A message states its layout once, as a
// function `layout(codec)` that names its fields in order. The classes here count the words of
// those fields, write them, read them with checks, and find the addresses among them.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "wire/address.h"
#include "wire/cursor.h"
#include "wire/message.h"

namespace shoal::wire {

using Words = std::span<const uint64_t>;

// What a message does with the segment at an address.
enum class Access : uint8_t {
  kNone,  // the field is not an address
  kRead,
  kWrite,
  kMake,  // the segment begins with this message
  kFree,
};

// What a reader accepts in a field, and what an address in it is for.
struct Rule {
  constexpr Rule() = default;
  constexpr Rule(uint64_t limit) : limit(limit) {}
  constexpr Rule(Access access) : access(access) {}
  constexpr Rule(uint64_t limit, Access access) : limit(limit), access(access) {}
  uint64_t limit = UINT64_MAX;  // of a value, or of a count
  Access access = Access::kNone;
};

// Counts words. The methods of every codec:
//   word    one word
//   halves  two numbers in one word; the rule is for the lower one
//   list    `count` words
//   bytes   `count` bytes, padded to whole words
//   left    for the count of a list: all words but the last `but`
struct Measure {
  size_t count = 0;
  void word(const char*, auto&, Rule = {}) { ++count; }
  void halves(const char*, uint32_t&, const char*, uint32_t&, Rule = {}) { ++count; }
  void list(const char*, Words& words, uint64_t, Rule = {}) { count += words.size(); }
  void bytes(const char*, std::string_view& data, uint64_t, Rule) {
    count += (data.size() + 7) / 8;
  }
  uint64_t left(uint64_t) { return 0; }
};

// Writes straight to where the message belongs. The limits are for the reader to check.
struct Writer {
  uint64_t* out;
  void word(const char*, auto& value, Rule = {}) {
    if constexpr (std::is_same_v<decltype(value), double&>) {
      *out++ = asWord(value);
    } else {
      *out++ = static_cast<uint64_t>(value);
    }
  }
  void halves(const char*, uint32_t& low, const char*, uint32_t& high, Rule = {}) {
    *out++ = pair(low, high);
  }
  void list(const char*, Words& words, uint64_t, Rule = {}) {
    out = std::copy(words.begin(), words.end(), out);
  }
  void bytes(const char*, std::string_view& data, uint64_t, Rule) {
    if (data.empty()) return;
    const size_t count = (data.size() + 7) / 8;
    out[count - 1] = 0;
    std::memcpy(out, data.data(), data.size());
    out += count;
  }
  uint64_t left(uint64_t) { return 0; }
};

// Reads words from outside. A violation throws ProtocolError. Lists and bytes are views of them.
struct Decoder {
  Reader reader;
  template <typename T>
  void word(const char* name, T& value, Rule rule = {}) {
    const uint64_t word = reader.word(name);
    if constexpr (std::is_same_v<T, double>) {
      value = asDouble(word);
    } else {
      if (word > rule.limit || (sizeof(T) < 8 && word > UINT32_MAX)) {
        refuse(name, word);
      }
      value = static_cast<T>(word);
    }
  }
  void halves(const char* name, uint32_t& low_half, const char*, uint32_t& high_half,
              Rule rule = {}) {
    const uint64_t word = reader.word(name);
    low_half = low(word);
    high_half = high(word);
    if (low_half > rule.limit) refuse(name, low_half);
  }
  void list(const char* name, Words& words, uint64_t count, Rule rule = {}) {
    const size_t checked = reader.count(count, rule.limit, 1, name);
    words = {reader.words(checked, name), checked};
  }
  void bytes(const char* name, std::string_view& data, uint64_t count, Rule rule) {
    data = reader.bytes(count, rule.limit, name);
  }
  uint64_t left(uint64_t but) {
    return reader.remaining() - reader.count(but, UINT64_MAX, 1, "words left");
  }
  [[noreturn]] static void refuse(const char* name, uint64_t value) {
    throw ProtocolError(std::string(name) + " cannot be " + std::to_string(value));
  }
};

// Calls `visit(address, access)` for every address.
template <typename Visit>
struct AddressVisitor {
  Visit& visit;
  void word(const char*, auto& value, Rule rule = {}) {
    if (rule.access != Access::kNone) visit(static_cast<Address>(value), rule.access);
  }
  void halves(const char*, uint32_t&, const char*, uint32_t&, Rule = {}) {}
  void list(const char*, Words& words, uint64_t, Rule rule = {}) {
    if (rule.access == Access::kNone) return;
    for (const Address address : words) visit(address, rule.access);
  }
  void bytes(const char*, std::string_view&, uint64_t, Rule) {}
  uint64_t left(uint64_t) { return 0; }
};

// Several words without rules: name, field, name, field, …
void eachWord(auto& codec, const char* name, auto& field, auto&... more) {
  codec.word(name, field);
  if constexpr (sizeof...(more) > 0) eachWord(codec, more...);
}

// --- messages as values: a type with fields, layout(), kKind, and for some flags

template <typename M>
uint16_t flagsOf(const M& message) {
  if constexpr (requires { message.flags; }) return message.flags;
  return 0;
}

// Words after the header.
template <typename M>
size_t wordsOf(M message) {
  Measure measure;
  message.layout(measure);
  return measure.count;
}

template <typename M>
void write(M message, uint64_t* out) {
  Writer writer{out};
  message.layout(writer);
}

template <typename M, typename Visit>
void eachAddress(M message, Visit&& visit) {
  AddressVisitor<Visit> visitor{visit};
  message.layout(visitor);
}

// The words of a message without its header, which the payload of a reply does not have.
template <typename M>
std::vector<uint64_t> body(const M& message) {
  std::vector<uint64_t> words(wordsOf(message));
  write(message, words.data());
  return words;
}

template <typename M>
void append(std::vector<uint64_t>& to, const M& message) {
  const size_t start = to.size();
  const size_t count = 1 + wordsOf(message);
  to.resize(start + count);
  to[start] = headerWord(static_cast<uint16_t>(M::kKind), static_cast<uint32_t>(count * 8),
                         flagsOf(message));
  write(message, to.data() + start + 1);
}

// Reads all of `body`, and throws ProtocolError where that is not exactly an M.
template <typename M>
M readBody(Words body, uint16_t flags = 0) {
  M message{};
  if constexpr (requires { message.flags; }) message.flags = flags;
  Decoder decoder{Reader(body.data(), body.size())};
  message.layout(decoder);
  decoder.reader.finish("message");
  return message;
}

// Reads a whole message, whose kind the caller knows.
template <typename M>
M read(Words message) {
  return readBody<M>(message.subspan(1), headerFlags(message[0]));
}

// All messages of one stream.
template <typename... Ms>
struct MessageList {
  // Calls `visit` with the message as a value of its type. False: no message has this kind.
  template <typename Visit>
  static bool decode(Words message, Visit&& visit) {
    const uint16_t kind = headerKind(message[0]);
    return ((kind == static_cast<uint16_t>(Ms::kKind) && (visit(read<Ms>(message)), true)) || ...);
  }
  // Calls `visit` with a value of each type.
  template <typename Visit>
  static constexpr void each(Visit&& visit) {
    (visit(Ms{}), ...);
  }
};

// A visitor that has a function for each type.
template <typename... Visits>
struct Overloaded : Visits... {
  using Visits::operator()...;
};

}  // namespace shoal::wire
