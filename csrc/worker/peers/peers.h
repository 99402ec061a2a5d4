// The other devices of the lease, as this worker sees them: how far each is, and where its segments
// are. This worker copies straight from their memory, without a message to their workers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memory/shared_memory.h"
#include "network/peer_link.h"
#include "transport/location_table.h"
#include "transport/progress.h"
#include "wire/address.h"

namespace shoal::worker {

struct PeerOptions {
  int progress_fd = -1, locations_fd = -1, arena_fd = -1;
  uint64_t arena_bytes = 0;
  std::string name;
  std::unique_ptr<network::PeerReader>
      elsewhere;  // set if it is on another machine: nothing is mapped
};

class Peers {
 public:
  // `host` is the client's region, which all workers of the lease map; `liveness` ends a wait if
  // the client is gone.
  Peers(const memory::SharedMemory& host, std::function<void()> liveness)
      : host_(host), liveness_(std::move(liveness)) {}

  void add(PeerOptions options);
  size_t count() const { return peers_.size(); }
  size_t countHere() const;  // on this machine, this device among them
  // How long this device has waited for others in total.
  int64_t waitedNs() const { return waited_ns_; }
  bool isPast(uint32_t peer, uint64_t sequence) const;
  // Waits until the peer has done its message `sequence`. Raises an error if the peer is lost: at
  // once if its process on this machine has ended or the client gave it up, else after a silence.
  void await(uint32_t peer, uint64_t sequence) const;
  // The same for a peer that reads from this device in that message. A peer that has ended does not
  // read.
  void awaitRead(uint32_t peer, uint64_t sequence) const;
  bool hasRead(uint32_t peer, uint64_t sequence) const {
    return isPast(peer, sequence) || at(peer).ended;
  }
  // Takes a chunk of a copy: [at, + bytes) of it.
  using Copy = network::PeerReader::Chunk;
  // Copies [offset, + bytes) of the peer's segment at `base` with `copy`, as early as possible. The
  // segment is valid from the peer's message `written` on, and kept from `exported` on. Returns
  // false if the peer has no such segment.
  bool read(uint32_t peer, const network::ReadRequest& request, const Copy& copy) const;
  // Asks a peer on another machine for bytes that read() will want later, and drops what messages
  // up to `reading` asked for. See network/peer_link.h.
  bool ask(uint32_t peer, const network::ReadRequest& request) const {
    return at(peer).elsewhere->ask(request);
  }
  void forget(uint32_t peer, uint64_t reading) const { at(peer).elsewhere->forget(reading); }
  // Bytes from other machines that arrived before they were needed.
  uint64_t aheadBytes() const;
  // How far a peer on another machine is, as it reports; null if it is on this one.
  transport::Progress* toldBy(uint32_t peer) const;
  const std::string& name(uint32_t peer) const { return at(peer).name; }

 private:
  struct Peer {
    std::string name;
    memory::SharedMemory progress_region, locations_region, arena;
    transport::Progress* progress;
    std::unique_ptr<transport::LocationTable> locations;
    std::unique_ptr<network::PeerReader> elsewhere;
    mutable std::optional<uint64_t> silent_since;  // its heartbeat when the silence was too long
    mutable bool ended = false;                    // its process on this machine has ended
  };
  [[noreturn]] static void raiseGone(const Peer& other, const std::string& why);
  [[noreturn]] static void raiseSilent(const Peer& other);
  static bool hasEnded(const Peer& other);
  bool awaitOrEnd(uint32_t peer, uint64_t sequence) const;
  const Peer& at(uint32_t peer) const;

  const memory::SharedMemory& host_;
  std::function<void()> liveness_;
  std::vector<Peer> peers_;
  mutable int64_t waited_ns_ = 0;  // only the worker's main thread reads from peers
};

}  // namespace shoal::worker
