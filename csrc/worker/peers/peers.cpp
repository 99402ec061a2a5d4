#include "worker/peers/peers.h"

#include <algorithm>

#include "base/clock.h"
#include "network/exported_read.h"
#include "transport/ring.h"
#include "wire/cursor.h"
#include "worker/failure/failure.h"

namespace shoal::worker {
namespace {

constexpr int64_t kSpinUs = 30;  // the peer is often almost done: spinning is cheaper than sleeping
constexpr int64_t kSliceMs = 50;  // between checks that all peers live

}  // namespace

void Peers::add(PeerOptions options) {
  using memory::SharedMemory;
  Peer peer;
  peer.name = std::move(options.name);
  if (options.elsewhere != nullptr) {
    peer.elsewhere = std::move(options.elsewhere);
    peer.progress_region = SharedMemory::create("shoal-told", transport::kProgressBytes);
    peer.progress = reinterpret_cast<transport::Progress*>(peer.progress_region.data());
    peers_.push_back(std::move(peer));
    return;
  }
  peer.progress_region = SharedMemory::attach(options.progress_fd, transport::kProgressBytes);
  peer.locations_region =
      SharedMemory::attach(options.locations_fd, transport::kLocationTableBytes);
  if (options.arena_bytes > 0) {
    peer.arena = SharedMemory::attach(options.arena_fd, options.arena_bytes);
  }
  peer.progress = reinterpret_cast<transport::Progress*>(peer.progress_region.data());
  peer.locations = std::make_unique<transport::LocationTable>(peer.locations_region.data());
  peers_.push_back(std::move(peer));
}

const Peers::Peer& Peers::at(uint32_t peer) const {
  if (peer >= peers_.size()) {
    throw wire::ProtocolError("the lease has no device " + std::to_string(peer));
  }
  return peers_[peer];
}

bool Peers::isPast(uint32_t peer, uint64_t sequence) const {
  return transport::isDone(*at(peer).progress, sequence);
}

size_t Peers::countHere() const {
  return static_cast<size_t>(std::count_if(
      peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.elsewhere == nullptr; }));
}

void Peers::await(uint32_t peer, uint64_t sequence) const {
  if (!awaitOrEnd(peer, sequence)) raiseGone(at(peer), "its worker process ended");
}

void Peers::awaitRead(uint32_t peer, uint64_t sequence) const {
  awaitOrEnd(peer, sequence);
}

// Returns false if the peer's process has ended without doing the message.
bool Peers::awaitOrEnd(uint32_t peer, uint64_t sequence) const {
  const Peer& other = at(peer);
  if (isPast(peer, sequence)) return true;
  if (other.ended) return false;
  const int64_t start = nowNs();
  uint64_t beat = other.progress->heartbeat.load(std::memory_order_relaxed);
  if (other.silent_since == beat) raiseSilent(other);  // lost before, and silent since
  int64_t beat_at = start;
  int64_t spin_us = kSpinUs;
  while (!transport::awaitDone(*other.progress, sequence, spin_us, kSliceMs)) {
    spin_us = 0;
    liveness_();
    if (hasEnded(other)) return isPast(peer, sequence);  // the message may be its last
    if (transport::isGivenUp(*other.progress)) raiseGone(other, "the program gave its worker up");
    const int64_t now = nowNs();
    const uint64_t seen = other.progress->heartbeat.load(std::memory_order_relaxed);
    if (seen != beat) {
      beat = seen;
      beat_at = now;
    }
    if (now - beat_at > int64_t{transport::kHeartbeatLostMs} * 1000000) {
      other.silent_since = beat;
      raiseSilent(other);
    }
  }
  waited_ns_ += nowNs() - start;
  return true;
}

bool Peers::hasEnded(const Peer& other) {
  if (other.elsewhere == nullptr && !other.progress_region.isClaimed()) other.ended = true;
  return other.ended;
}

void Peers::raiseSilent(const Peer& other) {
  raiseGone(other, "its worker gave no sign of life for " +
                       std::to_string(transport::kHeartbeatLostMs / 1000) +
                       " s while another device waited for its data");
}

void Peers::raiseGone(const Peer& other, const std::string& why) {
  throw PeerGone("device " + other.name + " of this lease was lost: " + why +
                     ". Call shoal.connect() for a new lease.",
                 other.name);
}

transport::Progress* Peers::toldBy(uint32_t peer) const {
  return peer < peers_.size() && peers_[peer].elsewhere != nullptr ? peers_[peer].progress
                                                                   : nullptr;
}

uint64_t Peers::aheadBytes() const {
  uint64_t total = 0;
  for (const Peer& peer : peers_) {
    if (peer.elsewhere != nullptr) total += peer.elsewhere->aheadBytes();
  }
  return total;
}

bool Peers::read(uint32_t peer, const network::ReadRequest& request, const Copy& copy) const {
  const Peer& other = at(peer);
  if (other.elsewhere != nullptr) {
    const int64_t start = nowNs();
    try {
      const bool there = other.elsewhere->read(request, copy);
      waited_ns_ += nowNs() - start;
      return there;
    } catch (const network::ConnectionLost& error) {
      raiseGone(other, error.what());
    }
  }
  const network::ShownMemory shown{other.progress, other.locations.get(), other.arena.span(),
                                   host_.span()};
  try {
    return network::readExported(
        shown, request, [&](uint64_t sequence) { await(peer, sequence); },
        [&](const std::byte* from) { copy(from, 0, request.bytes); });
  } catch (const wire::ProtocolError& error) {
    throw wire::ProtocolError("device " + other.name + ": " + error.what());
  }
}

}  // namespace shoal::worker
