// The worker's half of a session between machines: the other end of a ClientLink. Messages go into
// the requests ring, where the executor finds them as if the client had written them there;
// replies, progress and the bytes of transfers go back.
//
// Nothing that comes is trusted. The executor checks messages; here are checked their frames, and
// the sizes of transfers before memory is given to them. A violation ends the session, with a
// reason.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "memory/shared_memory.h"
#include "network/tls.h"
#include "transport/progress.h"

namespace shoal::network {

// Of the region that stands for the client's host memory: half for each direction.
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
