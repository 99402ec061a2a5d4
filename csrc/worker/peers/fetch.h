// The content of a kFetch or kFetchAdd message: which bytes of another device of the lease go
// where.
#pragma once

#include <cstdint>

#include "network/frames.h"
#include "wire/address.h"
#include "wire/cursor.h"

namespace shoal::worker {

struct Fetch {
  wire::Address to, from;
  uint64_t bytes;
  uint32_t peer;
  uint64_t written, exported;  // sequence numbers at the peer; see peers.h

  static Fetch of(wire::Reader& reader) {
    Fetch fetch{};
    fetch.to = reader.word("destination");
    fetch.from = reader.word("source");
    fetch.bytes = reader.word("bytes");
    const uint64_t peer = reader.word("peer");
    if (peer > UINT32_MAX) throw wire::ProtocolError("no such peer");
    fetch.peer = static_cast<uint32_t>(peer);
    fetch.written = reader.word("sequence");
    fetch.exported = reader.word("sequence");
    return fetch;
  }

  wire::Address base() const { return from - from % wire::kSlotBytes; }
  // [at, + count) of it, which message `reading` asks for.
  network::ReadRequest piece(uint64_t at, uint64_t count, uint64_t reading) const {
    return {base(), from - base() + at, count, written, exported, reading};
  }
  network::ReadRequest request(uint64_t reading) const { return piece(0, bytes, reading); }
};

}  // namespace shoal::worker
