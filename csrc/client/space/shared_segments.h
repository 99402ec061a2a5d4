// Segments in memory that other sessions have too.
//
// A shared segment has one copy, on one member: its home. Calls that use it run there, so every use
// is checked against what the sharing allows at that moment. Segments of the whole lease are all
// shared on the same member, so no call needs two of them.
//
// All of these raise shoal.ShareError.
#pragma once

#include "client/space/session.h"

namespace shoal::client {

// The descriptors of a shared memory (worker/shared/shared_block.h), which the session passes on to
// a worker.
struct SharedDescriptors {
  int memory = -1, control = -1, line = -1;
  uint64_t participant = 0;  // this session's number among those that share
};

// Moves the segment and its bytes to the memory behind `fds` on `member`, its only copy.
void share(Session& session, wire::Address base, size_t member, const SharedDescriptors& fds,
           wire::ShareMode mode);
// A new segment of the whole lease in memory that another session shares.
wire::Address openShared(Session& session, uint64_t bytes, size_t member,
                         const SharedDescriptors& fds, wire::ShareMode mode);
// Moves a shared segment back to memory of its own.
void unshare(Session& session, wire::Address base);
bool isShared(Session& session, wire::Address base);

}  // namespace shoal::client
