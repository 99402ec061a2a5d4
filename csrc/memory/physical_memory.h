// Memory of one kind behind a range of offsets: a device's, host memory or disk. All code that gets
// memory for segments, moves them or gives memory back uses this.
//
//   reserve   the constructor: offsets [0, bytes), and nothing behind them yet
//   map       puts memory behind a range, before it is used
//   unmap     gives whole pages back; their bytes are lost
//   copy      `copyIn`, `copyOut`: from and to bytes that have an address in this process
//
// Its user decides who owns which range (see block_allocator.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "memory/shared_memory.h"

namespace shoal::memory {

class PhysicalMemory {
 public:
  virtual ~PhysicalMemory() = default;
  PhysicalMemory(const PhysicalMemory&) = delete;

  uint64_t bytes() const { return bytes_; }
  // Both throw std::system_error if the system refuses.
  virtual void map(uint64_t offset, uint64_t bytes) = 0;
  virtual void unmap(uint64_t offset, uint64_t bytes) = 0;
  // Where offset 0 is in this process, or null if its bytes have no address here.
  virtual std::byte* data() const { return nullptr; }
  // Copy from and to bytes that have an address. Any thread. Both throw std::system_error.
  virtual void copyIn(uint64_t offset, const std::byte* from, uint64_t bytes) const = 0;
  virtual void copyOut(std::byte* to, uint64_t offset, uint64_t bytes) const = 0;

 protected:
  explicit PhysicalMemory(uint64_t bytes) : bytes_(bytes) {}

 private:
  uint64_t bytes_;
};

// A CPU device's memory, which other processes map too. `map` makes pages present: the first touch
// of a page costs ten times a copy.
class SharedFrames final : public PhysicalMemory {
 public:
  explicit SharedFrames(SharedMemory region)
      : PhysicalMemory(region.bytes()), region_(std::move(region)) {}
  void map(uint64_t offset, uint64_t bytes) override { region_.populate(offset, bytes); }
  void unmap(uint64_t offset, uint64_t bytes) override { region_.discard(offset, bytes); }
  std::byte* data() const override { return region_.data(); }
  void copyIn(uint64_t offset, const std::byte* from, uint64_t bytes) const override;
  void copyOut(std::byte* to, uint64_t offset, uint64_t bytes) const override;
  const SharedMemory& region() const { return region_; }

 private:
  SharedMemory region_;
};

// Host memory of this process alone. The system maps its pages when they are touched.
class HostFrames final : public PhysicalMemory {
 public:
  explicit HostFrames(uint64_t bytes);
  ~HostFrames() override;
  void map(uint64_t, uint64_t) override {}
  void unmap(uint64_t offset, uint64_t bytes) override;
  std::byte* data() const override { return data_; }
  void copyIn(uint64_t offset, const std::byte* from, uint64_t bytes) const override;
  void copyOut(std::byte* to, uint64_t offset, uint64_t bytes) const override;

 private:
  std::byte* data_ = nullptr;
};

// A file without a name, so that nothing is left of it however the process ends. The first `map`
// opens it. `map` reserves disk space with fallocate().
class DiskFrames final : public PhysicalMemory {
 public:
  DiskFrames(uint64_t bytes, std::string directory)
      : PhysicalMemory(bytes), directory_(std::move(directory)) {}
  ~DiskFrames() override;
  void map(uint64_t offset, uint64_t bytes) override;
  void unmap(uint64_t offset, uint64_t bytes) override;
  void copyIn(uint64_t offset, const std::byte* from, uint64_t bytes) const override;
  void copyOut(std::byte* to, uint64_t offset, uint64_t bytes) const override;

 private:
  std::string directory_;
  int file_ = -1;
};

}  // namespace shoal::memory
