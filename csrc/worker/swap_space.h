// Where a device's memory goes when the device is full: host memory first, then a file on disk. The
// file has no name, so nothing is left of it however the worker ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "memory/block_allocator.h"

namespace shoal::worker {

struct SwapOptions {
  uint64_t host_bytes = 0;
  uint64_t disk_bytes = 0;
  std::string directory;  // of the file; needed where disk_bytes > 0
};

// A block of swap space, or host memory that the client owns and the segment was adopted from.
struct SwapBlock {
  enum class Tier : uint8_t { kHost, kDisk, kAdopted } tier;
  uint64_t offset;               // kHost, kDisk
  std::byte* adopted = nullptr;  // kAdopted
};

class SwapSpace {
 public:
  explicit SwapSpace(SwapOptions options);
  ~SwapSpace();
  SwapSpace(const SwapSpace&) = delete;

  uint64_t bytes() const { return options_.host_bytes + options_.disk_bytes; }
  // Host memory while it lasts, then disk; nothing if both are full.
  std::optional<SwapBlock> allocate(uint64_t bytes);
  void release(const SwapBlock& block);
  // Throws c10::Error with what the system says. Any thread.
  void write(const SwapBlock& block, const std::byte* from, uint64_t bytes) const;
  void read(const SwapBlock& block, std::byte* to, uint64_t bytes) const;
  uint64_t hostUsed() const { return host_blocks_.usedBytes(); }
  uint64_t diskUsed() const { return disk_blocks_.usedBytes(); }

 private:
  void openFile();
  void reserve(uint64_t offset, uint64_t bytes);
  void raiseFull(int error) const;

  SwapOptions options_;
  std::byte* host_ = nullptr;
  int file_ = -1;
  memory::BlockAllocator host_blocks_, disk_blocks_;
};

}  // namespace shoal::worker
