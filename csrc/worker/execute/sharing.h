// Messages about memory that several sessions share.
#pragma once

#include <memory>

#include "wire/messages.h"
#include "worker/execute/session_memory.h"
#include "worker/shared/shared_memories.h"

namespace shoal::worker {

class Sharing {
 public:
  // `memories` holds what the client passes; null: nothing can be shared.
  Sharing(SessionMemory& memory, SharedMemories* memories) : memory_(memory), memories_(memories) {}

  void share(const wire::Share& message);
  void open(const wire::Open& message, uint64_t sequence);
  void unshare(const wire::Unshare& message);

 private:
  std::shared_ptr<SharedBlock> take(const auto& message, bool owner) const;

  SessionMemory& memory_;
  SharedMemories* memories_;
};

}  // namespace shoal::worker
