#include "memory/block_allocator.h"

#include <algorithm>
#include <bit>
#include <cassert>

namespace shoal::memory {

BlockAllocator::BlockAllocator(size_t capacity)
    : capacity_(capacity / kLargeGranule * kLargeGranule),
      slab_class_(capacity / kSlabBytes + 1, kNotSmall) {
  if (capacity_ > 0) {
    free_by_offset_.emplace(0, capacity_);
    free_by_size_.emplace(capacity_, 0);
  }
}

// Classes: 64-byte steps up to 512, then four to each doubling. Waste stays under 25 %.
size_t BlockAllocator::classOf(size_t bytes) {
  if (bytes <= 512) return bytes == 0 ? 0 : (bytes - 1) / 64;
  const int top = std::bit_width(bytes - 1) - 1;  // 2^top <= bytes-1 < 2^(top+1)
  const size_t step = size_t{1} << (top - 2);
  const size_t quarter = (bytes - 1 - (size_t{1} << top)) / step;
  return 8 + static_cast<size_t>(top - 9) * 4 + quarter;
}

size_t BlockAllocator::classBytes(size_t size_class) {
  if (size_class < 8) return (size_class + 1) * 64;
  const size_t top = 9 + (size_class - 8) / 4;
  const size_t quarter = (size_class - 8) % 4;
  return (size_t{1} << top) + (quarter + 1) * (size_t{1} << (top - 2));
}

std::optional<size_t> BlockAllocator::allocate(size_t bytes) {
  if (bytes > capacity_) return std::nullopt;
  if (bytes > kSmallMax) {
    auto offset = allocateLarge((bytes + kLargeGranule - 1) / kLargeGranule * kLargeGranule, 1);
    if (offset) used_ += large_bytes_.at(*offset);
    return offset;
  }
  const size_t size_class = classOf(bytes);
  auto& blocks = small_free_[size_class];
  if (blocks.empty() && !refill(size_class)) return std::nullopt;
  const size_t offset = blocks.back();
  blocks.pop_back();
  used_ += classBytes(size_class);
  return offset;
}

void BlockAllocator::release(size_t offset) {
  const uint8_t size_class = slab_class_[offset / kSlabBytes];
  if (size_class != kNotSmall) {
    used_ -= classBytes(size_class);
    small_free_[size_class].push_back(offset);
    return;
  }
  used_ -= large_bytes_.at(offset);
  releaseLarge(offset);
}

size_t BlockAllocator::blockBytes(size_t offset) const {
  const uint8_t size_class = slab_class_[offset / kSlabBytes];
  return size_class != kNotSmall ? classBytes(size_class) : large_bytes_.at(offset);
}

bool BlockAllocator::refill(size_t size_class) {
  auto slab = allocateLarge(kSlabBytes, kSlabBytes);
  if (!slab) return false;
  large_bytes_.erase(*slab);  // a slab belongs to its class from now on
  slab_class_[*slab / kSlabBytes] = static_cast<uint8_t>(size_class);
  const size_t bytes = classBytes(size_class);
  // Lowest offset on top, so that neighbours in time are neighbours in memory.
  for (size_t i = kSlabBytes / bytes; i-- > 0;) {
    small_free_[size_class].push_back(*slab + i * bytes);
  }
  return true;
}

std::optional<size_t> BlockAllocator::allocateLarge(size_t bytes, size_t alignment) {
  for (auto it = free_by_size_.lower_bound({bytes, 0}); it != free_by_size_.end(); ++it) {
    const auto [range_bytes, range_offset] = *it;
    const size_t start = (range_offset + alignment - 1) / alignment * alignment;
    const size_t lead = start - range_offset;
    if (lead + bytes > range_bytes) continue;
    free_by_size_.erase(it);
    free_by_offset_.erase(range_offset);
    const auto putBack = [this](size_t offset, size_t size) {
      if (size == 0) return;
      free_by_offset_.emplace(offset, size);
      free_by_size_.emplace(size, offset);
    };
    putBack(range_offset, lead);
    putBack(start + bytes, range_bytes - lead - bytes);
    large_bytes_.emplace(start, bytes);
    high_water_ = std::max(high_water_, start + bytes);
    return start;
  }
  return std::nullopt;
}

void BlockAllocator::releaseLarge(size_t offset) {
  const auto found = large_bytes_.find(offset);
  assert(found != large_bytes_.end());
  size_t bytes = found->second;
  large_bytes_.erase(found);
  auto next = free_by_offset_.lower_bound(offset);
  if (next != free_by_offset_.end() && next->first == offset + bytes) {
    bytes += next->second;
    free_by_size_.erase({next->second, next->first});
    next = free_by_offset_.erase(next);
  }
  if (next != free_by_offset_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      free_by_size_.erase({before->second, before->first});
      free_by_offset_.erase(before);
    }
  }
  free_by_offset_.emplace(offset, bytes);
  free_by_size_.emplace(bytes, offset);
}

size_t BlockAllocator::largestFree() const {
  return free_by_size_.empty() ? 0 : free_by_size_.rbegin()->first;
}

std::vector<std::pair<size_t, size_t>> BlockAllocator::freeRanges() const {
  return {free_by_offset_.begin(), free_by_offset_.end()};
}

}  // namespace shoal::memory
