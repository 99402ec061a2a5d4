// A sealed memfd and its mapping. The worker makes it and the client maps the same pages. The seals
// keep either side from shrinking it, which would be a SIGBUS in the other.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace shoal::memory {

class SharedMemory {
 public:
  SharedMemory() = default;
  // Makes a new region of `bytes` (rounded up to pages; sparse until touched).
  static SharedMemory create(const std::string& name, size_t bytes);
  // Maps a region that another process made, after checking its seals and size. Owns `fd`.
  static SharedMemory attach(int fd, size_t bytes);

  SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  std::span<const std::byte> span() const { return {data_, bytes_}; }
  int fd() const { return fd_; }
  bool contains(const void* p) const {
    auto* q = static_cast<const std::byte*>(p);
    return q >= data_ && q < data_ + bytes_;
  }
  // From now on other processes with the region can check whether this one lives. The claim is a
  // lock of the process on the file: the kernel drops it whenever the process ends, and a later
  // process with the same number does not have it. This process must not close any descriptor of
  // the region.
  void claim() const;
  // Whether another process has claimed the region and lives.
  bool isClaimed() const;
  // Makes the pages of [offset, offset + bytes) present: a first touch costs ten times a copy.
  void populate(size_t offset, size_t bytes) const;
  // Gives whole pages of the range back to the system. They read as zero afterwards.
  void discard(size_t offset, size_t bytes) const;

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  int fd_ = -1;
};

}  // namespace shoal::memory
