// Messages about the other devices of the lease: show them a segment, and copy from theirs.
#pragma once

#include <cstdint>
#include <memory>

#include "wire/messages.h"
#include "worker/execute/session_memory.h"
#include "worker/paging/fetch_ahead.h"
#include "worker/peers/fetch.h"

namespace shoal::worker {

class PeerCopies {
 public:
  // `peers` is null if the lease has one device. `requests` is the stream, to ask remote peers
  // early; null: no peer is asked early.
  PeerCopies(SessionMemory& memory, const Peers* peers, const transport::RingConsumer* requests);

  void exportTo(const wire::Export& message, uint64_t sequence);
  void fetch(const wire::Fetch& message, uint64_t sequence);
  void fetchAdd(const wire::FetchAdd& message, uint64_t sequence);
  // Call this between message `sequence` and the next one.
  void after(uint64_t sequence) {
    if (fetch_ahead_ != nullptr) fetch_ahead_->after(sequence);
  }
  uint64_t bytes() const { return bytes_; }

 private:
  void checkPeer(uint32_t peer) const;
  void addFrom(const wire::Fetch& fetch, at::ScalarType type, uint64_t sequence) const;
  void read(uint32_t peer, const network::ReadRequest& request, std::byte* to) const;

  SessionMemory& memory_;
  const Peers* peers_;
  std::unique_ptr<FetchAhead> fetch_ahead_;  // where the lease has devices on other machines
  uint64_t bytes_ = 0;                       // that came from peers
};

}  // namespace shoal::worker
