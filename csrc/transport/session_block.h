// Shared memory between a device server and one of its workers. The server makes it before the
// fork: no message of the op stream carries what it holds, and the client does not see it.
//
// The server writes orders: how much memory the session may use, and whether it runs. The worker
// writes what the session is and does. Each word has one writer. The server trusts no word of the
// worker's: a call may have taken the worker over.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace shoal::transport {

// What one prepared call has cost so far. Everything up to `calls` is written before `rows` counts
// the entry, and stays.
struct CallUse {
  static constexpr size_t kNameBytes = 64;
  char name[kNameBytes];  // of the operator, cut off
  uint64_t hash;          // of the operator and its template
  uint64_t flops, bytes;  // of one call
  uint32_t dtype;         // torch's number of it
  uint32_t updates;       // 1: it changes memory in place, as an optimizer does
  std::atomic<uint64_t> calls, ns;
  // How often it wrote to the memory that it wrote to first: in a training, once per step.
  std::atomic<uint64_t> repeats;
  uint64_t unused;
};
static_assert(sizeof(CallUse) == 128);

enum class SessionOrder : uint32_t { kRun = 0, kSuspend = 1 };

enum class SessionState : uint32_t {
  kRunning = 0,
  kSuspending = 1,
  kSuspended = 2,
  kRefused = 3,  // it cannot be suspended, for `reason`; it runs on
  kResuming = 4,
};

// Why a session cannot be suspended.
enum class SuspendRefusal : uint32_t {
  kNone = 0,
  kAccelerator = 1,  // the device's memory does not page
  kShares = 2,       // other programs map its memory
  kPeers = 3,        // other devices of its lease read its memory
};

struct SessionBlock {
  static constexpr size_t kRows = 4096;  // row 0 sums up whatever finds no row of its own

  // Written by the device server.
  alignas(64) std::atomic<uint64_t> limit_bytes;  // of the device's memory; changes
  std::atomic<uint64_t> ceiling_bytes;            // the limit can come up to this, if it must
  std::atomic<uint64_t> swap_limit_bytes;         // of host memory for evicted segments
  std::atomic<uint32_t> order;                    // SessionOrder

  // Written by the worker.
  alignas(64) std::atomic<uint32_t> state;  // SessionState
  std::atomic<uint32_t> reason;             // SuspendRefusal
  std::atomic<uint64_t> used_bytes;         // of the device's memory
  std::atomic<uint64_t> away_bytes;         // of segments that are in swap space only
  std::atomic<uint64_t> swap_bytes;         // of host memory in use
  std::atomic<uint64_t> disk_bytes;         // of the spill file in use
  std::atomic<uint64_t> peak_bytes;         // most of used and away together
  std::atomic<uint64_t> wanted_bytes;       // an allocation waits for this limit; 0: none waits
  alignas(64) std::atomic<uint32_t> rows;   // entries of `uses`
  alignas(64) CallUse uses[kRows];
};

inline constexpr size_t kSessionBlockBytes = sizeof(SessionBlock);

// For words with one writer: no locked instruction.
inline void addTo(std::atomic<uint64_t>& word, uint64_t more) {
  word.store(word.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
}

}  // namespace shoal::transport
