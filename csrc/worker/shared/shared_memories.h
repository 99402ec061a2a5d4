// Shared memory that the client passed over the session's socket and that no message has used yet.
// One thread receives it, another takes it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "worker/shared/shared_block.h"

namespace shoal::worker {

class SharedMemories {
 public:
  // Receives what the client passes. Throws wire::ProtocolError if it is not shared memory.
  void receive(int socket);
  // Takes the memory with this number. Waits a moment: the socket may be slower than the stream.
  SharedFds take(uint64_t number);

 private:
  std::mutex mutex_;
  std::condition_variable came_;
  std::unordered_map<uint64_t, SharedFds> arrived_;
};

}  // namespace shoal::worker
