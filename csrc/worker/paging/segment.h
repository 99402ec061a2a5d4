// A segment of the client's address space, as this device holds it.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "worker/accelerator/lanes.h"
#include "worker/failure/failure.h"
#include "worker/memory/copier.h"
#include "worker/paging/eviction_policy.h"
#include "worker/peers/peers.h"
#include "worker/shared/shared_block.h"

namespace shoal::worker {

// A device of the lease that reads a segment of this device. It is done with its message
// `sequence`.
struct PeerRead {
  uint32_t peer;
  uint64_t sequence;
};

struct Segment : PagedSegment {
  c10::Storage storage;
  bool bound = false;
  bool dropped = false;                   // it was dead when it left; its bytes are gone
  std::shared_ptr<const Failure> poison;  // set if the call that makes it failed
  std::vector<PeerRead> readers;
  Uses uses;                            // where the device runs late
  std::shared_ptr<SharedBlock> shared;  // set if other sessions map the memory too
  std::optional<SwapBlock> swap;
  std::shared_ptr<CopyJob> incoming;  // set while its memory is here and its bytes are not
  std::shared_ptr<CopyJob> outgoing;  // set while the copier writes it to swap space

  // Drops the readers that are done.
  void forgetReaders(const Peers& peers) {
    std::erase_if(readers, [&](const PeerRead& r) { return peers.hasRead(r.peer, r.sequence); });
  }
  // Waits until no peer reads it.
  void awaitReaders(const Peers& peers) {
    for (const PeerRead& reader : readers) peers.awaitRead(reader.peer, reader.sequence);
    readers.clear();
  }
};

}  // namespace shoal::worker
