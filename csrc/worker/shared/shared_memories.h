// Shared memories that the client has passed over the session's socket and no message has used yet.
// They come in one thread and are taken in another.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "worker/shared/shared_block.h"

namespace shoal::worker {

class SharedMemories {
 public:
  // Reads what the client passes. Throws wire::ProtocolError if that is no shared memory.
  void receive(int socket);
  // What came under this number; waits a moment, for the socket may be slower than the stream.
  SharedFds take(uint64_t number);

 private:
  std::mutex mutex_;
  std::condition_variable came_;
  std::unordered_map<uint64_t, SharedFds> arrived_;
};

}  // namespace shoal::worker
