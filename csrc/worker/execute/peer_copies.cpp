#include "worker/execute/peer_copies.h"

#include <ATen/Functions.h>

#include <algorithm>

#include "wire/cursor.h"

namespace shoal::worker {

using wire::ProtocolError;

namespace {

constexpr uint64_t kAddBytes = uint64_t{128} << 10;        // stays in the cache
constexpr uint64_t kAddBytesOnDevice = uint64_t{4} << 20;  // outweighs starting a copy and a kernel

}  // namespace

PeerCopies::PeerCopies(SessionMemory& memory, const Peers* peers,
                       const transport::RingConsumer* requests)
    : memory_(memory), peers_(peers) {
  if (peers_ != nullptr && peers_->countHere() < peers_->count() && requests != nullptr) {
    fetch_ahead_ = std::make_unique<FetchAhead>(*requests, *peers_);
  }
}

void PeerCopies::checkPeer(uint32_t peer) const {
  if (peers_ == nullptr || peer >= peers_->count()) throw ProtocolError("no such peer");
}

void PeerCopies::exportTo(const wire::Export& message, uint64_t sequence) {
  checkPeer(message.peer);
  memory_.segments().addReader(message.address, {message.peer, message.reading}, sequence);
}

void PeerCopies::fetch(const wire::Fetch& message, uint64_t sequence) {
  checkPeer(message.peer);
  const bool replica = message.to == message.from && baseOf(message) == message.from;
  if (replica) memory_.allocate(message.to, message.bytes, sequence, "a copy");
  memory_.copyInto(message.to, message.bytes, sequence, [&] {
    const auto target = memory_.range(message.to, message.bytes, true);
    read(message.peer, requestOf(message, sequence), target.data);
  });
  bytes_ += message.bytes;
}

void PeerCopies::fetchAdd(const wire::FetchAdd& message, uint64_t sequence) {
  const wire::Fetch& fetch = message.fetch;
  checkPeer(fetch.peer);
  const auto type = static_cast<at::ScalarType>(message.dtype);
  if (type != at::kFloat && type != at::kDouble && type != at::kHalf && type != at::kBFloat16) {
    throw ProtocolError("only floating point numbers are added");
  }
  const uint64_t item_bytes = at::elementSize(type);
  if (fetch.bytes % item_bytes != 0 || fetch.to % item_bytes != 0) {
    throw ProtocolError("a range is not whole elements");
  }
  memory_.copyInto(fetch.to, fetch.bytes, sequence, [&] { addFrom(fetch, type, sequence); });
  bytes_ += fetch.bytes;
}

void PeerCopies::addFrom(const wire::Fetch& fetch, at::ScalarType type, uint64_t sequence) const {
  const auto target = memory_.range(fetch.to, fetch.bytes, true);
  const bool elsewhere = peers_->toldBy(fetch.peer) != nullptr;
  // Add a chunk only when it is complete: a read may repeat it. From another machine everything
  // comes at once.
  Accelerator& device = memory_.device();
  const uint64_t most_bytes = device.runsLate() ? kAddBytesOnDevice : kAddBytes;
  const uint64_t piece_bytes = elsewhere ? fetch.bytes : std::min(fetch.bytes, most_bytes);
  const c10::Storage piece = device.allocate(piece_bytes);
  auto* const buffer = static_cast<std::byte*>(piece.mutable_data());
  const auto numbers = [&](void* data, uint64_t count_bytes) {
    return at::from_blob(data, {static_cast<int64_t>(count_bytes / at::elementSize(type))},
                         at::TensorOptions().dtype(type).device(device.device()));
  };
  for (uint64_t at = 0; at < fetch.bytes; at += piece_bytes) {
    const uint64_t now_bytes = std::min(piece_bytes, fetch.bytes - at);
    read(fetch.peer, requestOf(fetch, sequence, at, now_bytes), buffer);
    numbers(target.data + at, now_bytes).add_(numbers(buffer, now_bytes));
  }
}

void PeerCopies::read(uint32_t peer, const network::ReadRequest& request, std::byte* to) const {
  const auto copy = [&](const std::byte* from, uint64_t at, uint64_t piece_bytes) {
    memory_.put(to + at, from, piece_bytes);
  };
  if (peers_->read(peer, request, copy)) return;
  throw PeerFailed("device " + peers_->name(peer) +
                   " of this lease failed to compute a value that this device needs");
}

}  // namespace shoal::worker
