// Memory that several sessions of one owner share: the worker of each maps the same pages.
//
// It has three descriptors. `memory` is a sealed memfd with the bytes. If it is shared for reading,
// the kernel itself refuses to map it for writing. `control` is a page in which the node's
// directory (share_server.py in src/shoal/pool/node/shares) says who may use the memory now. It is
// sealed, so that only the directory writes to it. `line` closes when the block goes, for whatever
// reason: so the directory knows which sessions use the memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "wire/messages.h"

namespace shoal::worker {

struct ShareControl {
  std::atomic<uint64_t> revoked;  // 1: the owner has ended, or has stopped sharing it
  std::atomic<uint64_t> holder;   // the participant that holds it alone; 0: none
};
inline constexpr size_t kShareControlBytes = 4096;

// Received descriptors. The destructor closes them unless they are moved out.
class SharedFds {
 public:
  SharedFds() = default;
  SharedFds(int memory, int control, int line) : memory(memory), control(control), line(line) {}
  SharedFds(SharedFds&& other) noexcept { *this = std::move(other); }
  SharedFds& operator=(SharedFds&& other) noexcept {
    std::swap(memory, other.memory);
    std::swap(control, other.control);
    std::swap(line, other.line);
    return *this;
  }
  ~SharedFds();
  int memory = -1, control = -1, line = -1;
};

// The role of this session.
struct ShareRole {
  wire::ShareMode mode;
  uint64_t participant;  // its number in the control page
  bool owner;
};

class SharedBlock {
 public:
  // Checks the descriptors, so that no other process can truncate the memory later.
  SharedBlock(SharedFds fds, uint64_t bytes, ShareRole role);
  SharedBlock(const SharedBlock&) = delete;
  ~SharedBlock();

  // The owner fills the memory first. If it is shared for reading, no process can write from then
  // on.
  void fill(const std::byte* from);
  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  // Throws ShareError if this session may not use the memory now.
  void check(bool writes) const;

 private:
  void map(bool writable);
  void unmap();

  SharedFds fds_;
  uint64_t bytes_;
  ShareRole role_;
  std::byte* data_ = nullptr;
  const ShareControl* control_ = nullptr;
};

}  // namespace shoal::worker
