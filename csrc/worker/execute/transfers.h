// Messages that move bytes between the device and the client or a data reader at this node.
#pragma once

#include <cstdint>
#include <span>

#include "wire/messages.h"
#include "worker/execute/session_memory.h"
#include "worker/shared/reader_memory.h"

namespace shoal::worker {

class Transfers {
 public:
  // `reader` is null where the session has no data reader.
  Transfers(SessionMemory& memory, ReaderMemory* reader) : memory_(memory), reader_(reader) {}

  void adopt(const wire::Adopt& message);
  void write(const wire::Write& message);
  void copyIn(const wire::CopyIn& message);
  void copyOut(const wire::CopyOut& message);
  void copyWithin(const wire::CopyWithin& message, uint64_t sequence);
  void load(const wire::Load& message, uint64_t sequence);
  std::span<const std::byte> read(const wire::Read& message);
  // `arena` is the device's memory, null on accelerators.
  void locate(const wire::Locate& message, const memory::SharedMemory* arena);

  uint64_t inBytes() const { return in_bytes_; }
  uint64_t outBytes() const { return out_bytes_; }

 private:
  SessionMemory& memory_;
  ReaderMemory* reader_;
  uint64_t in_bytes_ = 0;
  uint64_t out_bytes_ = 0;
};

}  // namespace shoal::worker
