// The worker's half of a session between machines: the other end of a ClientLink. It puts messages
// into the requests ring, where the executor finds them as if the client had written them there. It
// sends replies, progress and the bytes of transfers back.
//
// It trusts nothing that arrives. The executor checks messages; the link checks their frames, and
// the sizes of transfers before it takes memory for them. A violation ends the session, with a
// reason.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "memory/shared_memory.h"
#include "network/tls/tls.h"
#include "transport/progress.h"

namespace shoal::network {

// Bytes of the region that emulates the client's host memory: half for each direction.
uint64_t stagingRegionBytes();

struct WorkerLinkOptions {
  std::byte* requests;
  std::byte* replies;
  std::byte* staging;
  transport::Progress* progress;
};

// Starts the threads that serve the connections: for each direction the stream and its lanes. They
// end the process when the client is gone.
void serveLink(WorkerLinkOptions options, std::vector<std::unique_ptr<Connection>> up,
               std::vector<std::unique_ptr<Connection>> down);

}  // namespace shoal::network
