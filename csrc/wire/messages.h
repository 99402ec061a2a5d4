// The messages of an op stream, one type for each kind. `layout` states the order of the fields,
// the limits that a reader checks, and what the message does with the segments that it names.
// `Reply` is what the worker answers; a message without it has no answer.
#pragma once

#include <array>

#include "wire/codec.h"
#include "wire/limits.h"
#include "wire/replies.h"
#include "wire/settings.h"

namespace shoal::wire {

// --- calls

// An operator with everything that repeats, sent once under a number.
struct Prepare {
  static constexpr Kind kKind = Kind::kPrepare;
  uint32_t id = 0;
  std::string_view name;     // of the operator
  Words arguments, outputs;  // wire/templates.h

  void layout(auto& codec) {
    auto name_bytes = static_cast<uint32_t>(name.size());
    auto argument_words = static_cast<uint32_t>(arguments.size());
    auto output_words = static_cast<uint32_t>(outputs.size());
    codec.halves("id", id, "name_bytes", name_bytes, kPreparedMax - 1);
    codec.halves("argument_words", argument_words, "output_words", output_words);
    codec.bytes("name", name, name_bytes, kOperatorNameBytesMax);
    codec.list("arguments", arguments, argument_words);
    codec.list("outputs", outputs, output_words);
  }
};

// Flags of a call.
inline constexpr uint16_t kFlagLearn = 1;        // reply with the outputs; a Bind follows
inline constexpr uint16_t kFlagRecord = 2;       // with kFlagLearn: keep the autograd graph
inline constexpr uint16_t kFlagLeaseRandom = 4;  // draw from the lease's generator

struct Call {
  static constexpr Kind kKind = Kind::kCall;
  uint16_t flags = 0;
  uint32_t id = 0;     // of the prepared call
  uint64_t graph = 0;  // only with kFlagRecord
  Words immediates;    // the template says which of them are addresses
  Words outputs;       // addresses; 0: an output without memory

  void layout(auto& codec) {
    auto output_count = static_cast<uint32_t>(outputs.size());
    codec.halves("id", id, "output_count", output_count, kPreparedMax - 1);
    if ((flags & kFlagRecord) != 0) codec.word("graph", graph);
    codec.list("immediates", immediates, codec.left(output_count));
    codec.list("outputs", outputs, output_count, {kOutputsMax, Access::kMake});
  }
};

// Names the outputs of the last learning call.
struct Bind {
  static constexpr Kind kKind = Kind::kBind;
  Words outputs;  // addresses; 0: an output without memory

  void layout(auto& codec) {
    uint64_t output_count = outputs.size();
    codec.word("output_count", output_count);
    codec.list("outputs", outputs, output_count, {kOutputsMax, Access::kMake});
  }
};

// Drops all prepared calls.
struct Forget {
  static constexpr Kind kKind = Kind::kForget;
  void layout(auto&) {}
};

struct Backward {
  static constexpr Kind kKind = Kind::kBackward;
  uint64_t graph = 0;
  Words gradients;  // of the recorded outputs; 0: there is none
  Words outputs;    // the gradients of the leaves

  void layout(auto& codec) {
    auto gradient_count = static_cast<uint32_t>(gradients.size());
    auto output_count = static_cast<uint32_t>(outputs.size());
    codec.word("graph", graph);
    codec.halves("gradient_count", gradient_count, "output_count", output_count);
    codec.list("gradients", gradients, gradient_count, {kOutputsMax, Access::kRead});
    codec.list("outputs", outputs, output_count, {kOutputsMax, Access::kMake});
  }
};

struct GraphDrop {
  static constexpr Kind kKind = Kind::kGraphDrop;
  uint64_t graph = 0;
  void layout(auto& codec) { codec.word("graph", graph); }
};

// --- segments

// Messages about [address, + bytes) and nothing else.
template <Kind kind, Access access, uint64_t limit = UINT64_MAX>
struct Range {
  static constexpr Kind kKind = kind;
  Address address = 0;
  uint64_t bytes = 0;

  void layout(auto& codec) {
    codec.word("address", address, access);
    codec.word("bytes", bytes, limit);
  }
};
using Allocate = Range<Kind::kAllocate, Access::kMake>;
struct Read : Range<Kind::kRead, Access::kRead, kInlineBytesMax> {
  using Reply = DataReply;
};
// Brings the segment to where the location table says that it is.
struct Locate : Range<Kind::kLocate, Access::kRead> {
  using Reply = EmptyReply;
};

struct Free {
  static constexpr Kind kKind = Kind::kFree;
  Words segments;
  void layout(auto& codec) { codec.list("segments", segments, codec.left(0), Access::kFree); }
};

struct Write {
  static constexpr Kind kKind = Kind::kWrite;
  Address address = 0;
  std::string_view data;

  void layout(auto& codec) {
    uint64_t bytes = data.size();
    codec.word("address", address, Access::kWrite);
    codec.word("bytes", bytes, kInlineBytesMax);
    codec.bytes("data", data, bytes, kInlineBytesMax);
  }
};

// Messages about a segment and host memory.
template <Kind kind, Access access>
struct HostRange {
  static constexpr Kind kKind = kind;
  Address address = 0;
  uint64_t bytes = 0;
  // An offset in the host region. Of a copy between machines: an address of the client's process at
  // the client, and the number of a lane on the wire (network/frames.h).
  uint64_t host = 0;

  void layout(auto& codec) {
    codec.word("address", address, access);
    eachWord(codec, "bytes", bytes, "host", host);
  }
};
using Adopt = HostRange<Kind::kAdopt, Access::kMake>;  // the host memory becomes the segment
using CopyIn = HostRange<Kind::kCopyIn, Access::kWrite>;
using CopyOut = HostRange<Kind::kCopyOut, Access::kRead>;

struct CopyWithin {
  static constexpr Kind kKind = Kind::kCopyWithin;
  Address to = 0, from = 0;
  uint64_t bytes = 0;

  void layout(auto& codec) {
    codec.word("to", to, Access::kWrite);
    codec.word("from", from, Access::kRead);
    codec.word("bytes", bytes);
  }
};

// Copies what a reader at the node has put into its memory.
struct Load {
  static constexpr Kind kKind = Kind::kLoad;
  Address address = 0;
  uint64_t bytes = 0, reader = 0;
  uint64_t offset = 0;  // in the reader's memory

  void layout(auto& codec) {
    codec.word("address", address, Access::kWrite);
    eachWord(codec, "bytes", bytes, "reader", reader, "offset", offset);
  }
};

// Gives cached memory back to the system.
struct Trim {
  static constexpr Kind kKind = Kind::kTrim;
  void layout(auto&) {}
};

// --- between devices of the lease

// A peer reads the segment until it is past its message `reading`.
struct Export {
  static constexpr Kind kKind = Kind::kExport;
  Address address = 0;
  uint32_t peer = 0;
  uint64_t reading = 0;

  void layout(auto& codec) {
    codec.word("address", address, Access::kRead);
    eachWord(codec, "peer", peer, "reading", reading);
  }
};

struct Fetch {
  static constexpr Kind kKind = Kind::kFetch;
  Address to = 0, from = 0;  // `from` is an address at the peer
  uint64_t bytes = 0;
  uint32_t peer = 0;
  // Messages of the peer: the one that wrote the value, and the Export. See worker/peers/peers.h.
  uint64_t written = 0, exported = 0;

  void layout(auto& codec) {
    codec.word("to", to, Access::kWrite);
    eachWord(codec, "from", from, "bytes", bytes, "peer", peer);
    eachWord(codec, "written", written, "exported", exported);
  }
};

// Adds what comes to what is there.
struct FetchAdd {
  static constexpr Kind kKind = Kind::kFetchAdd;
  Fetch fetch;
  uint8_t dtype = 0;  // at::ScalarType

  void layout(auto& codec) {
    fetch.layout(codec);
    codec.word("dtype", dtype, UINT8_MAX);
  }
};

// --- memory that other sessions have too

// What the sessions that share a segment may do with it.
enum class ShareMode : uint64_t {
  kRead = 0,       // all read, nobody writes
  kExclusive = 1,  // one at a time reads and writes
};

// A shared memory that the client has passed (transport/shared_passing.h) becomes the segment.
template <Kind kind, Access access>
struct Sharing {
  static constexpr Kind kKind = kind;
  using Reply = EmptyReply;
  Address address = 0;
  uint64_t bytes = 0;
  uint64_t number = 0;  // of the passing
  ShareMode mode = ShareMode::kRead;
  uint64_t participant = 0;

  void layout(auto& codec) {
    codec.word("address", address, access);
    eachWord(codec, "bytes", bytes, "number", number);
    codec.word("mode", mode, static_cast<uint64_t>(ShareMode::kExclusive));
    codec.word("participant", participant);
  }
};
using Share = Sharing<Kind::kShare, Access::kRead>;  // the memory gets the segment's bytes
using Open = Sharing<Kind::kOpen, Access::kMake>;    // the segment gets the memory's bytes

// The segment moves back to memory of this session alone.
struct Unshare {
  static constexpr Kind kKind = Kind::kUnshare;
  using Reply = EmptyReply;
  Address address = 0;
  void layout(auto& codec) { codec.word("address", address, Access::kWrite); }
};

// --- generators. Number 0 is the device's own.

// Where a lease has several devices, `torch.device("shoal")` draws from one generator, which moves
// to the device that needs it.
inline constexpr uint64_t kLeaseGenerator = 1;
inline constexpr uint64_t kFirstUserGenerator = 2;

struct Seed {
  static constexpr Kind kKind = Kind::kSeed;
  uint64_t generator = 0, seed = 0;
  void layout(auto& codec) { eachWord(codec, "generator", generator, "seed", seed); }
};

struct GeneratorGet {
  static constexpr Kind kKind = Kind::kGeneratorGet;
  using Reply = GeneratorReply;
  uint64_t generator = 0;
  void layout(auto& codec) { codec.word("generator", generator); }
};

struct GeneratorSet {
  static constexpr Kind kKind = Kind::kGeneratorSet;
  uint64_t generator = 0;
  GeneratorReply state;

  void layout(auto& codec) {
    codec.word("generator", generator);
    state.layout(codec);
  }
};

struct GeneratorDrop {
  static constexpr Kind kKind = Kind::kGeneratorDrop;
  uint64_t generator = 0;
  void layout(auto& codec) { codec.word("generator", generator); }
};

// Between a generator and a segment of the size of a SavedGenerator.
template <Kind kind, Access access>
struct GeneratorMove {
  static constexpr Kind kKind = kind;
  uint64_t generator = 0;
  Address address = 0;

  void layout(auto& codec) {
    codec.word("generator", generator);
    codec.word("address", address, access);
  }
};
using GeneratorSave = GeneratorMove<Kind::kGeneratorSave, Access::kMake>;
using GeneratorLoad = GeneratorMove<Kind::kGeneratorLoad, Access::kRead>;
struct SavedGenerator {
  uint64_t bytes = 0;
  std::array<std::byte, 8192 - 8> state{};
};

// --- stream events, and the stream itself

struct EventRecord {
  static constexpr Kind kKind = Kind::kEventRecord;
  uint64_t event = 0;
  void layout(auto& codec) { codec.word("event", event); }
};

struct EventElapsed {
  static constexpr Kind kKind = Kind::kEventElapsed;
  using Reply = ElapsedReply;
  uint64_t start = 0, end = 0;
  void layout(auto& codec) { eachWord(codec, "start", start, "end", end); }
};

struct EventDrop {
  static constexpr Kind kKind = Kind::kEventDrop;
  uint64_t event = 0;
  void layout(auto& codec) { codec.word("event", event); }
};

struct Sync {
  static constexpr Kind kKind = Kind::kSync;
  using Reply = EmptyReply;
  void layout(auto&) {}
};

struct Stats {
  static constexpr Kind kKind = Kind::kStats;
  using Reply = StatsReply;
  void layout(auto&) {}
};

using Messages = MessageList<Prepare, Call, Bind, Allocate, Free, Adopt, Write, CopyIn, CopyOut,
                             CopyWithin, Read, Locate, Seed, GeneratorGet, GeneratorSet,
                             GeneratorDrop, EventRecord, EventElapsed, EventDrop, Sync, Stats,
                             Forget, Backward, GraphDrop, Trim, Export, Fetch, GeneratorSave,
                             GeneratorLoad, Share, Open, Unshare, FetchAdd, Load, Settings>;

// By kind: whether the worker answers. A call is answered if it learns.
inline constexpr auto kReplies = [] {
  std::array<bool, kKindsEnd> replies{};
  size_t last = 0;
  Messages::each([&]<typename M>(const M&) {
    if (static_cast<size_t>(M::kKind) != ++last) throw "a kind is missing, or out of order";
    replies[last] = requires { typename M::Reply; };
  });
  return last + 1 == kKindsEnd ? replies : throw "a kind is missing";
}();
inline constexpr bool expectsReply(Kind kind, uint16_t flags) {
  return kReplies[static_cast<size_t>(kind)] || (kind == Kind::kCall && (flags & kFlagLearn) != 0);
}

}  // namespace shoal::wire
