// The user's lines that issued the latest messages, to name the line of a call that failed.
#pragma once

#include <array>
#include <cstdint>

#include "client/member/errors.h"

namespace shoal::client {

class CallLines {
 public:
  // Notes the user's line for the messages that this thread sends next. Do not hold the Lock: this
  // may take the GIL, whose holder may be waiting for the Lock to free a tensor.
  static void note() {
    if (const auto hook = lineHooks().current) current_ = hook();
  }
  // A token for the noted line. `set` notes a line that was noted before.
  static uint64_t current() { return current_; }
  static void set(uint64_t token) { current_ = token; }

  // Message `sequence` was sent by the noted line; `named` is false if it needs none of its own.
  void sent(uint64_t sequence, bool named) { tokens_[sequence % kKept] = named ? current_ : 0; }
  // The token of message `sequence`, if it is among the latest up to `last`; 0: unknown.
  uint64_t of(uint64_t sequence, uint64_t last) const {
    return sequence <= last && sequence + kKept > last ? tokens_[sequence % kKept] : 0;
  }

 private:
  static constexpr size_t kKept = 1 << 14;
  static inline thread_local uint64_t current_ = 0;
  std::array<uint64_t, kKept> tokens_{};
};

}  // namespace shoal::client
