// Copies of segments in memory that the other devices of the lease map. They read these where they
// cannot map the device's own memory.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>

#include "memory/block_allocator.h"
#include "memory/shared_memory.h"

namespace shoal::worker {

class ShownCopies {
 public:
  // So many bytes are shown at once, or one larger segment.
  static constexpr uint64_t kBytesMax = uint64_t{256} << 20;

  // `limit_bytes` is what the largest segment has.
  explicit ShownCopies(uint64_t limit_bytes);

  const memory::SharedMemory& region() const { return region_; }
  // Whether another copy of `bytes` must wait until earlier ones were read.
  bool isFull(uint64_t bytes) const {
    return blocks_.usedBytes() > 0 && blocks_.usedBytes() + bytes > kBytesMax;
  }
  // Memory for a copy. It is free again when its storage goes; only the worker's main thread lets
  // it go. Throws c10::OutOfMemoryError if there is none.
  c10::Storage allocate(uint64_t bytes);

 private:
  static void release(void* context);

  memory::SharedMemory region_;
  memory::BlockAllocator blocks_;
};

}  // namespace shoal::worker
