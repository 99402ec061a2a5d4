#include "memory/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "memory/pages.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace shoal::memory {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error("shared memory: " + what + ": " + std::strerror(errno));
}

size_t wholePages(size_t bytes) {
  const size_t page = systemPageBytes();
  return (bytes + page - 1) / page * page;
}

std::byte* map(int fd, size_t bytes) {
  // NORESERVE: a region is as large as the device may ever get; only touched pages cost memory.
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (data == MAP_FAILED) fail("cannot map " + std::to_string(bytes) + " bytes");
  madvise(data, bytes, MADV_HUGEPAGE);  // taken where the system allows it for shared memory
  return static_cast<std::byte*>(data);
}

}  // namespace

SharedMemory SharedMemory::create(const std::string& name, size_t bytes) {
  bytes = wholePages(bytes);
  SharedMemory region;
  region.fd_ = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (region.fd_ < 0) fail("memfd_create");
  if (ftruncate(region.fd_, static_cast<off_t>(bytes)) != 0) fail("cannot size " + name);
  if (fcntl(region.fd_, F_ADD_SEALS, kSeals) != 0) fail("cannot seal " + name);
  region.data_ = map(region.fd_, bytes);
  region.bytes_ = bytes;
  return region;
}

SharedMemory SharedMemory::attach(int fd, size_t bytes) {
  bytes = wholePages(bytes);
  SharedMemory region;
  region.fd_ = fd;
  struct stat info{};
  if (fstat(fd, &info) != 0) fail("cannot inspect the region");
  if ((fcntl(fd, F_GET_SEALS) & kSeals) != kSeals) {
    throw std::runtime_error("shared memory: the region is not sealed");
  }
  if (static_cast<size_t>(info.st_size) != bytes) {
    throw std::runtime_error("shared memory: the region has " + std::to_string(info.st_size) +
                             " bytes, not " + std::to_string(bytes));
  }
  region.data_ = map(fd, bytes);
  region.bytes_ = bytes;
  return region;
}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(fd_, other.fd_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, bytes_);
  if (fd_ >= 0) close(fd_);
}

void SharedMemory::claim() const {
  struct flock whole{};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  if (fcntl(fd_, F_SETLK, &whole) != 0) fail("cannot claim the region");
}

bool SharedMemory::isClaimed() const {
  struct flock whole{};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  return fcntl(fd_, F_GETLK, &whole) != 0 || whole.l_type != F_UNLCK;
}

void SharedMemory::populate(size_t offset, size_t bytes) const {
  if (madvise(data_ + offset, bytes, MADV_POPULATE_WRITE) == 0) return;
  // Kernels before 5.14: touch each page without changing it.
  const size_t page = systemPageBytes();
  for (size_t at = offset; at < offset + bytes; at += page) {
    auto* byte = reinterpret_cast<volatile char*>(data_ + at);
    *byte = *byte;
  }
}

void SharedMemory::discard(size_t offset, size_t bytes) const {
  const PageRange pages = pagesWithin(offset, bytes, systemPageBytes());
  madvise(data_ + pages.offset, pages.bytes, MADV_REMOVE);
}

}  // namespace shoal::memory
