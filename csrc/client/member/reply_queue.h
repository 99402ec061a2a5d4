// The replies of a member's worker, which several threads may wait for.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "client/member/liveness.h"
#include "memory/shared_memory.h"
#include "transport/ring.h"
#include "wire/replies.h"

namespace shoal::client {

inline constexpr int64_t kSliceMs = 50;  // a wait looks for signals and losses this often

class ReplyQueue {
 public:
  ReplyQueue(const memory::SharedMemory& region, Liveness& liveness);

  // Takes the reply to message `sequence`, if it comes within kSliceMs.
  bool take(uint64_t sequence, std::vector<uint64_t>& payload, wire::ErrorKind& error);
  // Nobody waits for this reply any more.
  void drop(uint64_t sequence);

 private:
  Liveness& liveness_;
  transport::RingConsumer ring_;
  std::timed_mutex mutex_;
  std::unordered_map<uint64_t, std::vector<uint64_t>> stash_;
  std::vector<uint64_t> reply_;
  std::unordered_set<uint64_t> unwanted_;  // messages whose wait was interrupted
};

}  // namespace shoal::client
