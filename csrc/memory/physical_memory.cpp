#include "memory/physical_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "memory/copy_bytes.h"
#include "memory/pages.h"

namespace shoal::memory {
namespace {

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

}  // namespace

void SharedFrames::copyIn(uint64_t offset, const std::byte* from, uint64_t bytes) const {
  copyBytes(data() + offset, from, bytes);
}

void SharedFrames::copyOut(std::byte* to, uint64_t offset, uint64_t bytes) const {
  copyBytes(to, data() + offset, bytes);
}

HostFrames::HostFrames(uint64_t bytes) : PhysicalMemory(bytes) {
  if (bytes == 0) return;
  // NORESERVE: only touched pages cost memory.
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) fail(errno, "no addresses for " + std::to_string(bytes) + " bytes");
  madvise(data, bytes, MADV_HUGEPAGE);
  data_ = static_cast<std::byte*>(data);
}

HostFrames::~HostFrames() {
  if (data_ != nullptr) munmap(data_, bytes());
}

void HostFrames::unmap(uint64_t offset, uint64_t bytes) {
  const PageRange pages = pagesWithin(offset, bytes, systemPageBytes());
  if (madvise(data_ + pages.offset, pages.bytes, MADV_DONTNEED) != 0) fail(errno, "host memory");
}

void HostFrames::copyIn(uint64_t offset, const std::byte* from, uint64_t bytes) const {
  copyBytes(data_ + offset, from, bytes);
}

void HostFrames::copyOut(std::byte* to, uint64_t offset, uint64_t bytes) const {
  copyBytes(to, data_ + offset, bytes);
}

DiskFrames::~DiskFrames() {
  if (file_ >= 0) close(file_);
}

void DiskFrames::map(uint64_t offset, uint64_t bytes) {
  if (file_ < 0) file_ = open(directory_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file_ < 0) fail(errno, directory_ + " cannot be written");
  if (fallocate(file_, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0) return;
  // A file system without fallocate() fails when it is written to.
  if (errno != EOPNOTSUPP && errno != ENOSYS) fail(errno, "writing to " + directory_ + " failed");
}

void DiskFrames::unmap(uint64_t offset, uint64_t bytes) {
  if (file_ < 0) return;
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(bytes));
}

void DiskFrames::copyIn(uint64_t offset, const std::byte* from, uint64_t bytes) const {
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t n = pwrite(file_, from + done, bytes - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail(n < 0 ? errno : EIO, "writing to " + directory_ + " failed");
    done += static_cast<uint64_t>(n);
  }
}

void DiskFrames::copyOut(std::byte* to, uint64_t offset, uint64_t bytes) const {
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t n = pread(file_, to + done, bytes - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail(n < 0 ? errno : EIO, "reading from " + directory_ + " failed");
    done += static_cast<uint64_t>(n);
  }
}

}  // namespace shoal::memory
