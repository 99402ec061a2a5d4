// A word in shared memory by which the worker says how far it got, so that the client can ask
// without a round trip.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace shoal::transport {

struct Progress {
  // Sequence number of the last message that was done. Published after `failed`.
  alignas(64) std::atomic<uint64_t> completed;
  std::atomic<uint32_t> failed;                 // 1: a failure waits to be told with the next reply
  alignas(64) std::atomic<uint64_t> heartbeat;  // grows every kHeartbeatMs, even during a long call
};

inline constexpr int kHeartbeatMs = 200;
inline constexpr int kHeartbeatLostMs = 4000;  // silence after which the worker counts as lost

inline constexpr size_t kProgressBytes = 4096;

}  // namespace shoal::transport
