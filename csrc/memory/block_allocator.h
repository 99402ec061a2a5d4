// Hands out ranges of a region: small blocks from slabs by size class, large ones by best fit with
// coalescing. It knows offsets only, never touches the memory, and is not thread-safe: its owner
// locks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

namespace shoal::memory {

class BlockAllocator {
 public:
  static constexpr size_t kAlignment = 64;         // as torch's CPU allocator promises
  static constexpr size_t kSlabBytes = 64 * 1024;  // a slab holds blocks of one size class
  static constexpr size_t kSmallMax = 16 * 1024;   // larger blocks come from the best-fit list
  static constexpr size_t kLargeGranule = 4096;

  explicit BlockAllocator(size_t capacity);

  // Returns the offset of a block of at least `bytes`, or nothing if none is free.
  std::optional<size_t> allocate(size_t bytes);
  void release(size_t offset);
  // Bytes of the block at `offset`: at least as many as were requested.
  size_t blockBytes(size_t offset) const;

  size_t capacity() const { return capacity_; }
  size_t usedBytes() const { return used_; }        // in allocated blocks
  size_t highWater() const { return high_water_; }  // end of the highest block so far
  size_t largestFree() const;
  // Free (offset, bytes) outside of slabs. The owner may give them back to the system.
  std::vector<std::pair<size_t, size_t>> freeRanges() const;

 private:
  static constexpr size_t kClasses = 33;
  static constexpr uint8_t kNotSmall = 0xff;

  static size_t classOf(size_t bytes);
  static size_t classBytes(size_t size_class);
  std::optional<size_t> allocateLarge(size_t bytes, size_t alignment);
  void releaseLarge(size_t offset);
  bool refill(size_t size_class);

  size_t capacity_;
  size_t used_ = 0;
  size_t high_water_ = 0;
  std::array<std::vector<size_t>, kClasses> small_free_;
  std::vector<uint8_t> slab_class_;  // by slab number; kNotSmall where no slab is
  std::map<size_t, size_t> free_by_offset_;
  std::set<std::pair<size_t, size_t>> free_by_size_;
  std::unordered_map<size_t, size_t> large_bytes_;
};

}  // namespace shoal::memory
