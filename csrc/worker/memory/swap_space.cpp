#include "worker/memory/swap_space.h"

#include <c10/util/Exception.h>

#include <system_error>

#include "memory/copy_bytes.h"

namespace shoal::worker {

using Tier = SwapBlock::Tier;

SwapSpace::SwapSpace(const SwapOptions& options)
    : host_{std::make_unique<memory::HostFrames>(options.host_bytes),
            memory::BlockAllocator(options.host_bytes)},
      disk_{std::make_unique<memory::DiskFrames>(options.disk_bytes, options.directory),
            memory::BlockAllocator(options.disk_bytes)},
      grant_(options.grant) {}

void SwapSpace::Level::trim() {
  for (const auto& [offset, bytes] : blocks.freeRanges()) memory->unmap(offset, bytes);
}

void SwapSpace::trim() {
  host_.trim();
  disk_.trim();
}

std::optional<size_t> SwapSpace::allocateHost(uint64_t bytes) {
  const uint64_t used = host_.blocks.usedBytes(), most = hostLimit();
  if (used > most || bytes > most - used) return std::nullopt;
  const auto offset = host_.blocks.allocate(bytes);
  if (grant_ != nullptr) grant_->publishSwap(host_.blocks.usedBytes());
  return offset;
}

std::optional<SwapBlock> SwapSpace::allocate(uint64_t bytes) {
  if (const auto offset = allocateHost(bytes)) return SwapBlock{Tier::kHost, *offset};
  const auto offset = disk_.blocks.allocate(bytes);
  if (!offset) return std::nullopt;
  try {
    try {
      disk_.memory->map(*offset, bytes);
    } catch (const std::system_error& error) {
      if (error.code() != std::errc::no_space_on_device) throw;
      disk_.trim();
      disk_.memory->map(*offset, bytes);
    }
  } catch (const std::system_error& error) {
    disk_.blocks.release(*offset);
    TORCH_CHECK_WITH(OutOfMemoryError, false,
                     "the device is full, and its spill directory does not take more: ",
                     error.what(), ". Free space there, or start the pool with $SHOAL_SPILL_DIR ",
                     "set to a directory that can be written.");
  }
  if (grant_ != nullptr) grant_->publishDisk(disk_.blocks.usedBytes());
  return SwapBlock{Tier::kDisk, *offset};
}

void SwapSpace::release(const SwapBlock& block) {
  if (block.tier == Tier::kHost) {
    host_.blocks.release(block.offset);
    if (grant_ != nullptr) grant_->publishSwap(host_.blocks.usedBytes());
  }
  if (block.tier == Tier::kDisk) {
    disk_.blocks.release(block.offset);
    if (grant_ != nullptr) grant_->publishDisk(disk_.blocks.usedBytes());
  }
}

void SwapSpace::write(const SwapBlock& block, uint64_t at, const std::byte* from,
                      uint64_t bytes) const {
  if (block.tier == Tier::kAdopted) return memory::copyBytes(block.adopted + at, from, bytes);
  if (block.tier == Tier::kHost) return host_.memory->copyIn(block.offset + at, from, bytes);
  try {
    disk_.memory->copyIn(block.offset + at, from, bytes);
  } catch (const std::system_error& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false,
                     "the device is full, and its spill directory cannot be written: ",
                     error.what(), ". Free space there, or start the pool with $SHOAL_SPILL_DIR ",
                     "set to a directory that can be written.");
  }
}

void SwapSpace::read(const SwapBlock& block, uint64_t at, std::byte* to, uint64_t bytes) const {
  if (block.tier == Tier::kAdopted) return memory::copyBytes(to, block.adopted + at, bytes);
  if (block.tier == Tier::kHost) return host_.memory->copyOut(to, block.offset + at, bytes);
  try {
    disk_.memory->copyOut(to, block.offset + at, bytes);
  } catch (const std::system_error& error) {
    TORCH_CHECK(false, "the spill directory cannot be read: ", error.what());
  }
}

}  // namespace shoal::worker
