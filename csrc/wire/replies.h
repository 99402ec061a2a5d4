// What a worker answers. A reply is a message whose kind is that of the request and whose flags are
// an ErrorKind.
#pragma once

#include "wire/codec.h"
#include "wire/limits.h"

namespace shoal::wire {

struct Reply {
  uint16_t flags = 0;
  uint64_t sequence = 0;  // of the request
  Words payload;          // one of the types below

  void layout(auto& codec) {
    codec.word("sequence", sequence);
    codec.list("payload", payload, codec.left(0));
  }
  ErrorKind error() const { return static_cast<ErrorKind>(flags); }
};

struct EmptyReply {
  void layout(auto&) {}
};

// The payload of every reply with an error.
struct ErrorReply {
  uint64_t sequence = 0;  // of the message that failed
  // The message in which the failure showed; 0: in the request itself, which concerns nobody else.
  uint64_t shown_in = 0;
  uint64_t text_bytes = 0, name_bytes = 0;
  // The text, and the operator's name; with kPeerLost, the lost device's name.
  std::string_view both;

  void layout(auto& codec) {
    eachWord(codec, "sequence", sequence, "shown_in", shown_in);
    codec.word("text_bytes", text_bytes, kErrorTextBytesMax);
    codec.word("name_bytes", name_bytes, kOperatorNameBytesMax);
    codec.bytes("both", both, text_bytes + name_bytes, UINT64_MAX);
  }
  std::string_view text() const { return both.substr(0, text_bytes); }
  std::string_view name() const { return both.substr(text_bytes); }
};

// As many bytes as the request asks for, padded to whole words.
struct DataReply {
  Words data;
  void layout(auto& codec) { codec.list("data", data, codec.left(0)); }
};

struct GeneratorReply {
  std::string_view state;

  void layout(auto& codec) {
    uint64_t bytes = state.size();
    codec.word("bytes", bytes);
    codec.bytes("state", state, bytes, kMessageBytesMax);
  }
};

struct ElapsedReply {
  double all_ms = 0, waited_ms = 0;  // waited: for other devices
  void layout(auto& codec) { eachWord(codec, "all_ms", all_ms, "waited_ms", waited_ms); }
};

// Counters of a worker. Python shows them under these names.
struct StatsReply {
  uint64_t used_bytes = 0, reserved_bytes = 0, segment_bytes = 0, segments = 0, calls = 0;
  uint64_t busy_ns = 0, bytes_in = 0, bytes_out = 0, bytes_peer = 0;
  uint64_t paged_in = 0, paged_out = 0, paged_disk = 0, dropped = 0, prefetched = 0;
  uint64_t stall_ns = 0, swapped_bytes = 0, peer_ahead = 0;

  void layout(auto& codec) {
    eachWord(codec, "used_bytes", used_bytes, "reserved_bytes", reserved_bytes);
    eachWord(codec, "segment_bytes", segment_bytes, "segments", segments, "calls", calls);
    eachWord(codec, "busy_ns", busy_ns, "bytes_in", bytes_in, "bytes_out", bytes_out);
    eachWord(codec, "bytes_peer", bytes_peer, "paged_in", paged_in, "paged_out", paged_out);
    eachWord(codec, "paged_disk", paged_disk, "dropped", dropped, "prefetched", prefetched);
    eachWord(codec, "stall_ns", stall_ns, "swapped_bytes", swapped_bytes);
    codec.word("peer_ahead", peer_ahead);
  }
};

}  // namespace shoal::wire
