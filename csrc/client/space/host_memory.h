// Host memory that every worker of this program maps too: torch's pinned allocator for the device,
// and the blocks through which pageable memory is sent. What lies here is sent as an offset.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "memory/block_allocator.h"
#include "memory/shared_memory.h"

namespace shoal::client {

class Member;

class HostMemory {
 public:
  // The program's only region, made at first use and kept until the program ends.
  static HostMemory& get();
  static bool exists();

  int fd() const { return region_.fd(); }
  uint64_t bytes() const { return region_.bytes(); }
  std::span<const std::byte> span() const { return region_.span(); }
  std::byte* at(uint64_t offset) const { return region_.data() + offset; }
  bool contains(const void* p) const { return region_.contains(p); }
  uint64_t offsetOf(const void* p) const {
    return static_cast<uint64_t>(static_cast<const std::byte*>(p) - region_.data());
  }

  uint64_t allocate(uint64_t bytes);  // throws c10::OutOfMemoryError
  // In a forked child: the region is still shared with the parent, the knowledge of what is free is
  // not, so nothing may be handed out any more.
  void abandon() { abandoned_ = true; }
  void release(uint64_t offset);
  // Releases blocks that a session had not let go of when it ended. A worker may still run its last
  // call on them, so they are free when no process claims one of `workers` any more.
  void releaseAfter(std::vector<uint64_t> offsets, std::vector<memory::SharedMemory> workers);

  // A pinned block may be freed while a worker still reads it: remembers the last use.
  void usedBy(const void* p, const Member& stream, uint64_t sequence);
  // Whether a worker may still have to write to or read from these bytes: then they are used in the
  // stream's order, not now. May be true for bytes beside those that were meant.
  bool inUse(const void* p, uint64_t bytes);

  class PinnedAllocator;
  static c10::Allocator* pinnedAllocator();

 private:
  HostMemory();
  struct Use {
    uint32_t session, member;
    uint64_t sequence;
  };
  static Member* pendingOn(const Use& use);  // null: the use is over
  void releasePinned(uint64_t offset);
  friend class PinnedAllocator;

  memory::SharedMemory region_;
  bool abandoned_ = false;
  std::mutex mutex_;
  memory::BlockAllocator blocks_;
  std::map<uint64_t, Use> last_use_;  // by offset of the range that was used
  struct Left {
    std::vector<uint64_t> offsets;
    std::vector<memory::SharedMemory> workers;
  };
  void reclaimLeft();       // the mutex is held
  std::vector<Left> left_;  // by sessions that have ended
};

}  // namespace shoal::client
