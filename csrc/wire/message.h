// The head of a message, and the numbers of kinds and errors. wire/messages.h has a type for each
// kind.
//
// A message is a whole number of 64-bit words:
//
//   word 0   bytes (32) | kind (16) | flags (16)      bytes counts word 0 too
//   word 1…  the fields of its type
//
// Both sides number the messages of an op stream from 1. The number of a message is its sequence
// number.
#pragma once

#include <cstdint>
#include <iterator>

namespace shoal::wire {

enum class Kind : uint16_t {
  kPad = 0,  // fills the end of a ring; has no sequence number
  kPrepare = 1,
  kCall = 2,
  kBind = 3,
  kAllocate = 4,
  kFree = 5,
  kAdopt = 6,
  kWrite = 7,
  kCopyIn = 8,
  kCopyOut = 9,
  kCopyWithin = 10,
  kRead = 11,
  kLocate = 12,
  kSeed = 13,
  kGeneratorGet = 14,
  kGeneratorSet = 15,
  kGeneratorDrop = 16,
  kEventRecord = 17,
  kEventElapsed = 18,
  kEventDrop = 19,
  kSync = 20,
  kStats = 21,
  kForget = 22,
  kBackward = 23,
  kGraphDrop = 24,
  kTrim = 25,
  kExport = 26,
  kFetch = 27,
  kGeneratorSave = 28,
  kGeneratorLoad = 29,
  kShare = 30,
  kOpen = 31,
  kUnshare = 32,
  kFetchAdd = 33,
  kLoad = 34,
  kSettings = 35,
};
inline constexpr const char* kKindNames[] = {
    "pad",           "prepare",        "call",         "bind",           "allocate",
    "free",          "adopt",          "write",        "copy_in",        "copy_out",
    "copy_within",   "read",           "locate",       "seed",           "generator_get",
    "generator_set", "generator_drop", "event_record", "event_elapsed",  "event_drop",
    "sync",          "stats",          "forget",       "backward",       "graph_drop",
    "trim",          "export",         "fetch",        "generator_save", "generator_load",
    "share",         "open",           "unshare",      "fetch_add",      "load",
    "settings"};
inline constexpr uint16_t kKindsEnd = std::size(kKindNames);
static_assert(kKindsEnd == static_cast<uint16_t>(Kind::kSettings) + 1);

enum class ErrorKind : uint16_t {
  kNone = 0,
  kRuntime = 1,
  kIndex = 2,
  kValue = 3,
  kType = 4,
  kNotImplemented = 5,
  kOutOfMemory = 6,
  kLinAlg = 7,
  kProtocol = 8,       // the client broke the protocol: a bug, or an attack
  kPoisoned = 9,       // a call that failed before was to make the value
  kPeerFailed = 10,    // the value comes from another device of the lease, where it failed
  kPeerLost = 11,      // another device of the lease was lost while this one waited for its data
  kShareRefused = 12,  // a use of shared memory that its sharing forbids
  kShareRevoked = 13,  // the owner of shared memory has ended, or no longer shares it
};

inline constexpr uint64_t headerWord(uint16_t kind, uint32_t bytes, uint16_t flags) {
  return uint64_t{bytes} | (uint64_t{kind} << 32) | (uint64_t{flags} << 48);
}
inline constexpr uint64_t headerWord(Kind kind, uint32_t bytes, uint16_t flags) {
  return headerWord(static_cast<uint16_t>(kind), bytes, flags);
}
inline constexpr uint32_t headerBytes(uint64_t word) {
  return static_cast<uint32_t>(word);
}
inline constexpr uint16_t headerKind(uint64_t word) {
  return static_cast<uint16_t>(word >> 32);
}
inline constexpr uint16_t headerFlags(uint64_t word) {
  return static_cast<uint16_t>(word >> 48);
}

inline constexpr uint64_t pair(uint32_t low, uint32_t high) {
  return uint64_t{low} | (uint64_t{high} << 32);
}
inline constexpr uint32_t low(uint64_t word) {
  return static_cast<uint32_t>(word);
}
inline constexpr uint32_t high(uint64_t word) {
  return static_cast<uint32_t>(word >> 32);
}

}  // namespace shoal::wire
