// How a client passes a shared memory to its worker: sixteen bytes and three descriptors (memory,
// control page, line) on the session's Unix socket, which carries nothing else once the op stream
// runs.
#pragma once

#include <cstdint>

namespace shoal::transport {

struct SharedPassing {
  static constexpr uint64_t kMagic = 0x6572616873'6873ull;  // "shshare"
  uint64_t magic = kMagic;
  uint64_t number = 0;  // by which a message of the stream names it
};

struct CameShared {
  int fds[3] = {-1, -1, -1};  // those that came belong to the caller
  bool whole = false;         // all that belongs to it came, and nothing else
  bool again = false;         // nothing was there after all
};

// Takes one passing off the socket without waiting.
CameShared receiveShared(int socket, SharedPassing& passing);
// False (and errno) if it cannot be sent at once. The descriptors stay the caller's.
bool sendShared(int socket, const SharedPassing& passing, const int (&fds)[3]);

}  // namespace shoal::transport
