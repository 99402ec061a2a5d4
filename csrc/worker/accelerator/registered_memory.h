// Host memory that the device copies from and to by itself. It is registered piece by piece, when a
// copy first touches it: a region is as large as the machine, and registering it pins its pages.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>

#include "worker/accelerator/accelerator.h"

namespace shoal::worker {

class RegisteredMemory {
 public:
  static constexpr uint64_t kPieceBytes = uint64_t{32} << 20;

  // At most `limit_bytes` are registered at once. Pieces that no copy uses make room.
  RegisteredMemory(Accelerator& device, uint64_t limit_bytes)
      : device_(device), limit_bytes_(limit_bytes) {}
  ~RegisteredMemory();

  // Copies may touch this memory from now on. It is never unmapped.
  void add(std::byte* data, uint64_t bytes) { regions_[data] = bytes; }

  // Registers what message `now` copies; all messages up to `done` are done. Calls
  // `copy(offset, bytes)` for the parts of the range: a copy never crosses two registrations.
  template <typename Copy>
  void each(const std::byte* data, uint64_t bytes, uint64_t now, uint64_t done, const Copy& copy) {
    for (uint64_t at = 0; at < bytes;) {
      const uint64_t part = std::min(bytes - at, touch(data + at, now, done));
      copy(at, part);
      at += part;
    }
  }
  uint64_t bytes() const { return bytes_; }

 private:
  uint64_t touch(const std::byte* data, uint64_t now, uint64_t done);
  bool makeRoom(uint64_t bytes, uint64_t done);

  struct Piece {
    uint64_t bytes;
    uint64_t used;  // the last message that copies it
  };
  Accelerator& device_;
  uint64_t limit_bytes_;
  uint64_t bytes_ = 0;
  std::map<std::byte*, uint64_t> regions_;  // bytes
  std::map<std::byte*, Piece> pieces_;
};

}  // namespace shoal::worker
