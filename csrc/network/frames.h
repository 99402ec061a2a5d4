// What goes over the data connections of a session between machines. `layout` of a frame is as in
// wire/messages.h.
//
// There are two streams, each used in one direction, so that neither ever waits for the other:
//
//   up     client → worker   the messages of the op stream, without padding. `host` of a CopyIn is
//                            the number of the lane that has its bytes, or 0 if they follow.
//   down   worker → client   replies, and the frames below.
//
// Beside each stream are as many lanes as the client opened. They carry whole chunks and nothing
// else.
//
// The streams are in order, so nothing else needs a number: a reply counts when the bytes of every
// CopyOut before it are there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "wire/messages.h"

namespace shoal::network {

// Bytes of one CopyIn or CopyOut: a larger transfer is several of them, so that the wire, the
// worker's copy and the client's overlap. Lanes carry whole chunks; smaller ones are not worth it.
inline constexpr uint64_t kChunkBytes = uint64_t{1} << 18;
inline constexpr uint32_t kLanesMax = 4;  // of each direction
// Chunks that a worker holds in each direction. When they are full, the client waits.
inline constexpr uint64_t kStagingBytes = 64 * kChunkBytes;
// Messages that wait for the bytes of chunks before them.
inline constexpr size_t kHeldBytesMax = size_t{1} << 20;

// Kinds of frames. Their header is that of a message.
enum class Frame : uint16_t {
  kProgress = 0x100,
  kData = 0x101,
  kGoodbye = 0x102,
  kEnd = 0x103,
  kWait = 0x104,
  kMoment = 0x105,
};

// --- down, beside replies

// How far the worker is.
struct ProgressFrame {
  static constexpr Frame kKind = Frame::kProgress;
  uint64_t done = 0, failed = 0, heartbeat = 0;
  void layout(auto& codec) {
    wire::eachWord(codec, "done", done, "failed", failed, "heartbeat", heartbeat);
  }
};

// The bytes of the next CopyOut.
struct DataFrame {
  static constexpr Frame kKind = Frame::kData;
  uint64_t bytes = 0;
  uint64_t lane = 0;  // 0: the bytes follow the frame
  void layout(auto& codec) { wire::eachWord(codec, "bytes", bytes, "lane", lane); }
};

// Why the worker ends the session.
struct GoodbyeFrame {
  static constexpr Frame kKind = Frame::kGoodbye;
  static constexpr size_t kTextBytesMax = 4096;
  std::string_view text;
  void layout(auto& codec) {
    uint64_t bytes = text.size();
    codec.word("bytes", bytes);
    codec.bytes("text", text, bytes, kTextBytesMax);
  }
};

// When the device passed a stream event.
struct MomentFrame {
  static constexpr Frame kKind = Frame::kMoment;
  uint64_t event = 0;
  int64_t ns = 0, waited_ns = 0;
  void layout(auto& codec) {
    wire::eachWord(codec, "event", event, "ns", ns, "waited_ns", waited_ns);
  }
};

using DownFrames = wire::MessageList<ProgressFrame, DataFrame, GoodbyeFrame, MomentFrame>;

// --- answers to a ReadRequest

// The bytes follow. They replace those of the ChunkFrame before.
struct ChunkFrame {
  static constexpr Frame kKind = Frame::kData;
  uint64_t bytes = 0;
  void layout(auto& codec) { codec.word("bytes", bytes); }
};

// The peer lives and is not there yet.
struct WaitFrame {
  static constexpr Frame kKind = Frame::kWait;
  uint64_t unused = 0;
  void layout(auto& codec) { codec.word("unused", unused); }
};

struct EndFrame {
  static constexpr Frame kKind = Frame::kEnd;
  bool there = false;  // the last bytes are the segment's; false: there is none
  void layout(auto& codec) { codec.word("there", there, 1); }
};

using ReadFrames = wire::MessageList<ChunkFrame, WaitFrame, EndFrame>;

// A data connection begins with this and the session's data id, both in plain.
inline constexpr char kDataMagic[] = "SHOALDAT";

// The first thing on a data connection, when TLS is up.
enum class Purpose : uint32_t { kUp = 1, kDown = 2, kRead = 3, kProgress = 4 };
struct Greeting {
  std::array<unsigned char, 32> secret;  // of the session
  Purpose purpose;
  // kRead and kProgress: who connects, of the lease. kUp and kDown: laneWord().
  uint32_t member;
};
static_assert(sizeof(Greeting) == 40);
// Connection `lane` of one purpose: 0 is the stream itself, 1 … `lanes` are its lanes.
inline constexpr uint32_t laneWord(uint32_t lane, uint32_t lanes) {
  return lanes << 16 | lane;
}
inline constexpr uint64_t kGreetingAnswer = 0x0a4b4f4c414f4853;  // "SHOALOK\n"
inline constexpr int64_t kGreetingMs = 5000;

// What a reader asks of a peer on a connection of purpose kRead.
struct ReadRequest {
  uint64_t base, offset, bytes;
  uint64_t written, exported;  // sequence numbers at the peer; see worker/peers/peers.h
  uint64_t reading;            // the reader's message that asks
  bool operator==(const ReadRequest&) const = default;
};
static_assert(sizeof(ReadRequest) == 48);

// What a worker says of itself on a connection of purpose kProgress.
struct PeerProgress {
  uint64_t done, heartbeat;
  bool operator==(const PeerProgress&) const = default;
};
static_assert(sizeof(PeerProgress) == 16);

}  // namespace shoal::network
