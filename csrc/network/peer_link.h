// Copies between workers of one lease on different machines. The reader connects to the other's
// door, as the client does, and asks; the other answers straight from its memory, when it has got
// so far. No message to its executor.
//
// A second connection tells the other how far the reader is: it keeps what it exported until then.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "memory/shared_memory.h"
#include "network/frames.h"
#include "network/tls.h"
#include "transport/places.h"
#include "transport/progress.h"

namespace shoal::network {

// Where a worker's device server listens, and what its worker wants to see.
struct PeerEndpoint {
  std::string host;
  uint16_t port = 0;
  std::string server_name;
  std::array<unsigned char, 16> data_id;
  std::array<unsigned char, 32> secret;
};

// A new connection to a peer, on which `purpose` is agreed. `member` is who we are in the lease.
std::unique_ptr<Connection> openPeer(const Tls& tls, const PeerEndpoint& peer, Purpose purpose,
                                     uint32_t member);

class PeerReader {
 public:
  PeerReader(const Tls& tls, PeerEndpoint peer, uint32_t member)
      : tls_(tls), peer_(std::move(peer)), member_(member) {}

  // [at, + bytes) of the range that was asked for. The same range may come twice: the last counts.
  using Piece = std::function<void(const std::byte* from, uint64_t at, uint64_t bytes)>;
  // False if the peer has no such segment. Throws ConnectionLost, and after it always.
  bool read(const ReadRequest& request, const Piece& piece);

 private:
  bool readOnce(const ReadRequest& request, const Piece& piece);

  const Tls& tls_;
  PeerEndpoint peer_;
  uint32_t member_;
  std::unique_ptr<Connection> connection_;  // made at first use
  std::vector<std::byte> buffer_;
  std::string lost_;  // why there is no connection any more
};

// What a worker has to show: how far it is, and where its segments are.
struct OwnMemory {
  const transport::Progress* progress;
  const transport::Places* places;
  const memory::SharedMemory* arena;  // null: the device's memory is not ours to read
  const memory::SharedMemory* host;
};

// Serve one connection of a peer, until it ends.
// `seen` is the peer's progress as we know it.
void serveReads(Connection& connection, const OwnMemory& own, transport::Progress& seen);
void followProgress(Connection& connection, transport::Progress& seen);

// Tells a peer how far we are, until it is gone; in a thread of its own.
void tellProgress(const Tls& tls, const PeerEndpoint& peer, uint32_t member,
                  const transport::Progress& own);

}  // namespace shoal::network
