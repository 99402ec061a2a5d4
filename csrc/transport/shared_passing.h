// How a client passes shared memory to its worker: sixteen bytes and three descriptors (memory,
// control page, line) on the session's Unix socket. Once the op stream runs, the socket carries
// nothing else.
#pragma once

#include <cstdint>

namespace shoal::transport {

struct SharedPassing {
  static constexpr uint64_t kMagic = 0x6572616873'6873ull;  // "shshare"
  uint64_t magic = kMagic;
  uint64_t number = 0;  // a message of the stream names it by this
};

struct CameShared {
  int fds[3] = {-1, -1, -1};  // the caller owns those that arrived
  bool whole = false;         // all of it arrived, and nothing else
  bool again = false;         // nothing was there: try again
};

// Receives one passing without waiting.
CameShared receiveShared(int socket, SharedPassing& passing);
// Returns false, with errno, if it cannot be sent at once. The caller keeps the descriptors.
bool sendShared(int socket, const SharedPassing& passing, const int (&fds)[3]);

}  // namespace shoal::transport
