#include "worker/shared/shared_block.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "memory/copy_bytes.h"
#include "wire/cursor.h"
#include "worker/failure/failure.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace shoal::worker {
namespace {

using wire::ProtocolError;
using wire::ShareMode;

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

uint64_t wholePages(uint64_t bytes) {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

// Checks for a memfd of exactly this size with these seals, so that no access can be a SIGBUS.
void checkRegion(int fd, uint64_t bytes, int seals, const char* what) {
  struct stat info{};
  const int found = fcntl(fd, F_GET_SEALS);
  if (found < 0 || (found & seals) != seals) {
    throw ProtocolError(std::string(what) + " of a shared memory is not sealed");
  }
  if (fstat(fd, &info) != 0 || static_cast<uint64_t>(info.st_size) != bytes) {
    throw ProtocolError(std::string(what) + " of a shared memory does not have " +
                        std::to_string(bytes) + " bytes");
  }
}

void closeFd(int& fd) {
  if (fd >= 0) close(fd);
  fd = -1;
}

}  // namespace

SharedFds::~SharedFds() {
  for (int* fd : {&memory, &control, &line}) closeFd(*fd);
}

SharedBlock::SharedBlock(SharedFds fds, uint64_t bytes, ShareRole role)
    : fds_(std::move(fds)), bytes_(bytes), role_(role) {
  int seals = kSizeSeals;
  if (!role.owner) {
    seals |= F_SEAL_SEAL | (role.mode == ShareMode::kRead ? F_SEAL_FUTURE_WRITE : 0);
  }
  checkRegion(fds_.memory, wholePages(bytes), seals, "the memory");
  checkRegion(fds_.control, kShareControlBytes, kSizeSeals, "the control page");
  void* page = mmap(nullptr, kShareControlBytes, PROT_READ, MAP_SHARED, fds_.control, 0);
  if (page == MAP_FAILED) throw std::runtime_error("the control page cannot be mapped");
  control_ = static_cast<const ShareControl*>(page);
  closeFd(fds_.control);
  if (role.owner) return;  // fill() maps it
  try {
    map(role.mode == ShareMode::kExclusive);
  } catch (...) {
    munmap(page, kShareControlBytes);
    throw;
  }
  closeFd(fds_.memory);
}

SharedBlock::~SharedBlock() {
  unmap();
  munmap(const_cast<ShareControl*>(control_), kShareControlBytes);
}

void SharedBlock::map(bool writable) {
  const int access = PROT_READ | (writable ? PROT_WRITE : 0);
  void* data = mmap(nullptr, wholePages(bytes_), access, MAP_SHARED, fds_.memory, 0);
  if (data == MAP_FAILED) {
    throw std::runtime_error("a shared memory of " + std::to_string(bytes_) +
                             " bytes cannot be mapped: " + std::strerror(errno));
  }
  data_ = static_cast<std::byte*>(data);
}

void SharedBlock::unmap() {
  if (data_ != nullptr) munmap(data_, wholePages(bytes_));
  data_ = nullptr;
}

void SharedBlock::fill(const std::byte* from) {
  map(/*writable=*/true);
  memory::copyBytes(data_, from, bytes_);
  const bool read = role_.mode == ShareMode::kRead;
  // This mapping is the last one that can write.
  if (read) unmap();
  const int seals = F_SEAL_SEAL | (read ? F_SEAL_FUTURE_WRITE : 0);
  if (fcntl(fds_.memory, F_ADD_SEALS, seals) != 0) {
    throw ProtocolError("the memory of a share was sealed before its owner filled it");
  }
  if (read) map(/*writable=*/false);
  closeFd(fds_.memory);
}

void SharedBlock::check(bool writes) const {
  const bool revoked = control_->revoked.load(std::memory_order_acquire) != 0;
  if (revoked && !role_.owner) {
    throw ShareError(
        "this shared memory was taken back: the program that shared it has ended, lost its lease, "
        "freed the tensor or called shoal.unshare(). Copy what you need while it is shared "
        "(tensor.clone()), or ask its owner for a new handle.",
        /*revoked=*/true);
  }
  if (role_.mode == ShareMode::kRead) {
    if (!writes) return;
    throw ShareError(
        "this tensor is shared for reading, so nobody writes to it. Write to a copy "
        "(tensor.clone()), or share it with shoal.share(tensor, mode=\"exclusive\").",
        /*revoked=*/false);
  }
  if (revoked) return;  // only its owner still uses it
  const uint64_t holder = control_->holder.load(std::memory_order_acquire);
  if (holder == role_.participant) return;
  throw ShareError(holder == 0
                       ? "this tensor is shared exclusively and this program does not hold it. "
                         "Type: with shoal.acquire(handle): …"
                       : "this tensor is shared exclusively and another program holds it now. "
                         "Wait for it: with shoal.acquire(handle): …",
                   /*revoked=*/false);
}

}  // namespace shoal::worker
