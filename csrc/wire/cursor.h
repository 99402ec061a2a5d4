// A cursor over words that came from outside. Every access is checked; a violation throws
// ProtocolError, which ends the message, never the process.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

namespace shoal::wire {

class ProtocolError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Reader {
 public:
  Reader(const uint64_t* words, size_t count) : at_(words), end_(words + count) {}

  size_t remaining() const { return static_cast<size_t>(end_ - at_); }

  uint64_t word(const char* what) {
    require(1, what);
    return *at_++;
  }

  const uint64_t* words(size_t count, const char* what) {
    require(count, what);
    const uint64_t* start = at_;
    at_ += count;
    return start;
  }

  // `bytes` of text or data, padded to whole words.
  std::string_view bytes(size_t bytes, size_t limit, const char* what) {
    if (bytes > limit) {
      throw ProtocolError(std::string(what) + " of " + std::to_string(bytes) +
                          " bytes is over the limit of " + std::to_string(limit));
    }
    const uint64_t* start = words((bytes + 7) / 8, what);
    return {reinterpret_cast<const char*>(start), bytes};
  }

  // A count that the words still to come must be able to hold, `words_each` words for each item.
  size_t count(uint64_t value, size_t limit, size_t words_each, const char* what) const {
    if (value > limit || value * words_each > remaining()) {
      throw ProtocolError(std::string(what) + ": a count of " + std::to_string(value) +
                          " does not fit the message");
    }
    return static_cast<size_t>(value);
  }

  void finish(const char* what) const {
    if (at_ != end_) {
      throw ProtocolError(std::string(what) + ": " + std::to_string(remaining()) +
                          " words too many");
    }
  }

 private:
  void require(size_t count, const char* what) const {
    if (count > remaining()) {
      throw ProtocolError(std::string(what) + ": the message ends too early");
    }
  }

  const uint64_t* at_;
  const uint64_t* end_;
};

inline double asDouble(uint64_t word) {
  double value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}
inline uint64_t asWord(double value) {
  uint64_t word;
  std::memcpy(&word, &value, sizeof word);
  return word;
}

}  // namespace shoal::wire
