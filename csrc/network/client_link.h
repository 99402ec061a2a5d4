// The client's half of a session between machines. It emulates a worker on this machine: it takes
// messages out of the requests ring and sends them, and puts answers into the replies ring and the
// completion counters. The code above sees the same shared memory as on one machine.
//
// The third word of a kCopyIn or kCopyOut is an address of this process here: the link copies
// between it and the socket directly. The memory must stay until the message is sent (kCopyIn) or
// done (kCopyOut).
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
#include "network/tls/tls.h"
#include "transport/progress.h"

namespace shoal::network {

struct ClientLinkOptions {
  // Connected to the device server, which knows the session: for each direction the stream and its
  // lanes. The link closes them, even if it cannot be set up.
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
  // New descriptors of requests, replies, progress and locations, as a worker would send them.
  std::vector<int> fds() const;

  // Waits at most `timeout_ms` until message `sequence` has left, so that the memory it names may
  // change. True also when the link is lost.
  bool awaitSent(uint64_t sequence, int64_t timeout_ms);
  // Why the link is lost; empty while it works.
  std::string failure() const;
  ConnectionLost::Cause failureCause() const;
  // Ends the link. Afterwards no thread of it reads or writes memory of the program.
  void stop() noexcept;
  // Call this in a forked child, which does not have the link's threads.
  void abandon() noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace shoal::network
