// Replies to reads of a device that runs late. A read waits for the operators before it, and for
// nothing else: not for copies, and not for what came later.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>

#include "worker/accelerator/late.h"
#include "worker/process/ring_replies.h"

namespace shoal::worker {

class LateReads {
 public:
  explicit LateReads(RingReplies& ring) : ring_(ring) {}

  // Of the thread that issues: the bytes are there when its work so far is done.
  void add(Late& late, uint64_t sequence, std::span<const std::byte> bytes);
  // Its own thread.
  [[noreturn]] void run(Accelerator& device, Late& late);

 private:
  struct Read {
    uint64_t sequence;
    std::span<const std::byte> bytes;
    Ticket ready;
  };
  Read next();

  RingReplies& ring_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable added_;
  std::deque<Read> reads_;
};

}  // namespace shoal::worker
