// The client's half of a session between machines. It stands where a worker on this machine would:
// it takes the messages out of the requests ring and sends them, and puts what comes back into the
// replies ring and the progress word. Everything above sees the same shared memory as always.
//
// The third word of a kCopyIn or kCopyOut is here an address of this process: bytes go between it
// and the socket, without a stop. The memory must stay until the message is sent (kCopyIn) or done
// (kCopyOut).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "memory/shared_memory.h"
#include "network/frames.h"
#include "network/tls.h"
#include "transport/progress.h"

namespace shoal::network {

struct ClientLinkOptions {
  // Connected to the device server's door, which was told the session: for each direction the
  // stream and its lanes. The link closes them, also when it does not come up.
  std::vector<int> up_fds, down_fds;
  Identity identity;
  std::string server_name;
  std::array<unsigned char, 32> secret;
};

class ClientLink {
 public:
  // Shakes hands on all connections; throws ConnectionLost.
  explicit ClientLink(ClientLinkOptions options);
  ~ClientLink();
  ClientLink(const ClientLink&) = delete;

  size_t lanes() const;  // of each direction, at most
  // New descriptors of requests, replies, progress and places, as a worker would send them.
  std::vector<int> fds() const;

  // Waits at most `timeout_ms` until message `sequence` has left, so that the memory it names may
  // change. True also when the link is lost.
  bool awaitSent(uint64_t sequence, int64_t timeout_ms);
  // Why the link does not work any more; empty while it does.
  std::string failure() const;
  ConnectionLost::Cause failureCause() const;
  // Ends it. When this returns, nothing reads or writes memory of the program any more.
  void stop() noexcept;
  // In a forked child, where there are no threads of ours.
  void abandon() noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace shoal::network
