// What a session has of its device now. The device server changes it while the session runs.
#pragma once

#include <cstdint>

#include "transport/session_block.h"

namespace shoal::worker {

// The memory that a session has now, as its device server decides, and what it uses of it.
class Grant {
 public:
  // `rings` is an event of the device server, which looks at the block when it is written to.
  Grant(transport::SessionBlock& block, int rings) : block_(block), rings_(rings) {}

  uint64_t limitBytes() const { return block_.limit_bytes.load(std::memory_order_relaxed); }
  uint64_t ceilingBytes() const { return block_.ceiling_bytes.load(std::memory_order_relaxed); }
  uint64_t swapLimitBytes() const {
    return block_.swap_limit_bytes.load(std::memory_order_relaxed);
  }
  void publishUsed(uint64_t used_bytes);
  // Segments left for swap space, or came back (negative).
  void moveAway(int64_t bytes);
  void publishSwap(uint64_t bytes);
  void publishDisk(uint64_t bytes) { block_.disk_bytes.store(bytes, std::memory_order_relaxed); }
  // So many bytes of the device's memory count as the host's now.
  void setAside(uint64_t bytes);
  // Waits until the limit is `bytes`. Returns false if the device cannot give so much.
  bool await(uint64_t bytes);
  void ring() const;
  transport::SessionBlock& block() { return block_; }

 private:
  transport::SessionBlock& block_;
  int rings_;
  uint64_t swap_bytes_ = 0, aside_bytes_ = 0;
};

}  // namespace shoal::worker
