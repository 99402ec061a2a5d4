// Where a device's memory goes when the device is full: host memory first, then a file on disk.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "memory/block_allocator.h"
#include "memory/physical_memory.h"
#include "worker/memory/grant.h"

namespace shoal::worker {

struct SwapOptions {
  uint64_t host_bytes = 0;
  uint64_t disk_bytes = 0;
  std::string directory;   // of the file; needed where disk_bytes > 0
  Grant* grant = nullptr;  // limits the host memory in use; null: all of it may be used
};

// A block of swap space, or the client's host memory that the segment was adopted from.
struct SwapBlock {
  enum class Tier : uint8_t { kHost, kDisk, kAdopted } tier;
  uint64_t offset;               // kHost, kDisk
  std::byte* adopted = nullptr;  // kAdopted
};

class SwapSpace {
 public:
  explicit SwapSpace(const SwapOptions& options);

  uint64_t bytes() const { return hostLimit() + disk_.memory->bytes(); }
  // Takes host memory while it lasts, then disk. Returns nothing if both are full. Throws
  // c10::OutOfMemoryError with the system's reason if the disk holds less than declared.
  std::optional<SwapBlock> allocate(uint64_t bytes);
  void release(const SwapBlock& block);
  // Copy [at, at + bytes) of a block. Any thread. Both throw c10::Error with the system's reason.
  void write(const SwapBlock& block, uint64_t at, const std::byte* from, uint64_t bytes) const;
  void read(const SwapBlock& block, uint64_t at, std::byte* to, uint64_t bytes) const;
  // Gives unused memory back to the system.
  void trim();
  uint64_t usedBytes() const { return host_.blocks.usedBytes() + disk_.blocks.usedBytes(); }

 private:
  struct Level {
    std::unique_ptr<memory::PhysicalMemory> memory;
    memory::BlockAllocator blocks;
    void trim();
  };

  uint64_t hostLimit() const {
    const uint64_t most = host_.memory->bytes();
    return grant_ == nullptr ? most : std::min(most, grant_->swapLimitBytes());
  }
  std::optional<size_t> allocateHost(uint64_t bytes);

  Level host_, disk_;
  Grant* grant_;
};

}  // namespace shoal::worker
