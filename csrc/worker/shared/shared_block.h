// Memory that several sessions of one owner have: the same pages, mapped by the worker of each.
//
// Three descriptors make one. `memory` is a sealed memfd with the bytes; where everybody only
// reads, the kernel itself refuses to map it for writing. `control` is a page in which the node's
// directory (src/shoal/pool/node/share_server.py) says who may use the memory now; it is sealed, so
// that only the directory writes to it. `line` tells the directory that we are here: it closes when
// the block goes, whatever the reason.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "wire/messages.h"

namespace shoal::worker {

// Shared memory was used in a way that its sharing does not allow (any more).
class ShareError : public std::runtime_error {
 public:
  ShareError(const std::string& text, bool revoked) : std::runtime_error(text), revoked(revoked) {}
  bool revoked;
};

struct ShareControl {
  std::atomic<uint64_t> revoked;  // 1: the owner has ended, or shares it no longer
  std::atomic<uint64_t> holder;   // the participant that has it alone; 0: nobody
};
inline constexpr size_t kShareControlBytes = 4096;

// Descriptors as they came; closed unless somebody takes them.
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

// What this session is to the memory.
struct ShareRole {
  wire::ShareMode mode;
  uint64_t participant;  // its number in the control page
  bool owner;
};

class SharedBlock {
 public:
  // Checks that the descriptors are what they should be: nobody can cut the memory short under us.
  SharedBlock(SharedFds fds, uint64_t bytes, ShareRole role);
  SharedBlock(const SharedBlock&) = delete;
  ~SharedBlock();

  // The owner's first act: its bytes. Where everybody only reads, nobody can write from then on.
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
