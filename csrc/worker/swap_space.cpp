#include "worker/swap_space.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "memory/copy_bytes.h"

namespace shoal::worker {

using Tier = SwapBlock::Tier;

SwapSpace::SwapSpace(SwapOptions options)
    : options_(std::move(options)),
      host_blocks_(options_.host_bytes),
      disk_blocks_(options_.disk_bytes) {
  if (options_.host_bytes == 0) return;
  // NORESERVE: only what is swapped out costs memory.
  void* data = mmap(nullptr, options_.host_bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(data != MAP_FAILED, "no address space for ", options_.host_bytes,
              " bytes of swap space: ", std::strerror(errno));
  madvise(data, options_.host_bytes, MADV_HUGEPAGE);
  host_ = static_cast<std::byte*>(data);
}

SwapSpace::~SwapSpace() {
  if (host_ != nullptr) munmap(host_, options_.host_bytes);
  if (file_ >= 0) close(file_);
}

std::optional<SwapBlock> SwapSpace::allocate(uint64_t bytes) {
  if (const auto offset = host_blocks_.allocate(bytes)) return SwapBlock{Tier::kHost, *offset};
  const auto offset = disk_blocks_.allocate(bytes);
  if (!offset) return std::nullopt;
  try {
    openFile();
    reserve(*offset, bytes);
  } catch (...) {
    disk_blocks_.release(*offset);
    throw;
  }
  return SwapBlock{Tier::kDisk, *offset};
}

void SwapSpace::openFile() {
  if (file_ >= 0) return;
  file_ = open(options_.directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  TORCH_CHECK_WITH(OutOfMemoryError, file_ >= 0, "the device is full, and its spill directory ",
                   options_.directory, " cannot be written: ", std::strerror(errno),
                   ". Start the pool with $SHOAL_SPILL_DIR set to a directory that can.");
}

// The disk's promise is taken now: what is written later finds its place.
void SwapSpace::reserve(uint64_t offset, uint64_t bytes) {
  const auto take = [&] {
    return fallocate(file_, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0;
  };
  if (take()) return;
  if (errno == ENOSPC) {
    for (const auto& [start, length] : disk_blocks_.freeRanges()) {
      fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(start),
                static_cast<off_t>(length));
    }
    if (take()) return;
  }
  // A file system that cannot reserve says so when it is written to.
  if (errno == EOPNOTSUPP || errno == ENOSYS) return;
  raiseFull(errno);
}

void SwapSpace::raiseFull(int error) const {
  TORCH_CHECK_WITH(OutOfMemoryError, false, "the device is full, and writing to its spill ",
                   "directory ", options_.directory, " failed: ", std::strerror(error),
                   ". Free space there, or set $SHOAL_SPILL_DIR when the pool starts.");
}

void SwapSpace::release(const SwapBlock& block) {
  if (block.tier == Tier::kHost) host_blocks_.release(block.offset);
  if (block.tier == Tier::kDisk) disk_blocks_.release(block.offset);
}

void SwapSpace::write(const SwapBlock& block, const std::byte* from, uint64_t bytes) const {
  if (block.tier != Tier::kDisk) {
    std::byte* to = block.tier == Tier::kHost ? host_ + block.offset : block.adopted;
    return memory::copyBytes(to, from, bytes);
  }
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t n =
        pwrite(file_, from + done, bytes - done, static_cast<off_t>(block.offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) raiseFull(errno);
    done += static_cast<uint64_t>(n);
  }
}

void SwapSpace::read(const SwapBlock& block, std::byte* to, uint64_t bytes) const {
  if (block.tier != Tier::kDisk) {
    const std::byte* from = block.tier == Tier::kHost ? host_ + block.offset : block.adopted;
    return memory::copyBytes(to, from, bytes);
  }
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t n =
        pread(file_, to + done, bytes - done, static_cast<off_t>(block.offset + done));
    if (n < 0 && errno == EINTR) continue;
    TORCH_CHECK(n > 0, "reading from the spill directory ", options_.directory,
                " failed: ", n == 0 ? "the file is too short" : std::strerror(errno));
    done += static_cast<uint64_t>(n);
  }
}

}  // namespace shoal::worker
