// The device server's orders, carried out between two messages: keep to a new limit, suspend,
// resume.
#pragma once

#include <cstdint>

#include "transport/session_block.h"
#include "worker/memory/arena.h"
#include "worker/memory/grant.h"
#include "worker/paging/segments.h"
#include "worker/peers/peers.h"

namespace shoal::worker {

class ServerOrders {
 public:
  // `grant` is null if no device server limits the session, `arena` on accelerators, `peers` if the
  // lease has one device.
  ServerOrders(Grant* grant, Arena* arena, Segments& segments, const Peers* peers)
      : grant_(grant), arena_(arena), segments_(segments), peers_(peers) {}

  bool any() const {
    if (grant_ == nullptr) return false;
    const auto order = grant_->block().order.load(std::memory_order_relaxed);
    return order != static_cast<uint32_t>(seen_order_) || grant_->limitBytes() != seen_limit_bytes_;
  }
  // A suspended session does not come back from here until it is resumed.
  void obey();

 private:
  void shrink();
  transport::SuspendRefusal suspend();
  void resume();

  Grant* grant_;
  Arena* arena_;
  Segments& segments_;
  const Peers* peers_;
  uint64_t seen_limit_bytes_ = 0;
  transport::SessionOrder seen_order_ = transport::SessionOrder::kRun;
};

}  // namespace shoal::worker
