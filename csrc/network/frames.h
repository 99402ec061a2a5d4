// The frames on the data connections of a session between machines.
//
// There are two streams, each used in one direction, so that neither ever waits for the other:
//
//   up     client → worker   the messages of the op stream, as in wire/message.h and without
//                            padding. A host offset is valid on one machine only. It is replaced
//                            by the number of the lane that carries the bytes of a kCopyIn, or by
//                            0 if they follow here.
//   down   worker → client   replies as in wire/message.h, and the frames below.
//
// Beside each there are as many lanes as the client opened. A lane carries the bytes of whole
// chunks and nothing else.
//
// The streams are in order, so nothing else needs a number: a reply that says "done" counts when
// the bytes of every kCopyOut before it are there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "wire/message.h"

namespace shoal::network {

// Bytes of one kCopyIn or kCopyOut. A larger transfer is several chunks, so that the wire, the
// worker's copy and the client's overlap. Lanes carry whole chunks; smaller ones are not worth it.
inline constexpr uint64_t kPieceBytes = uint64_t{1} << 18;
inline constexpr uint32_t kLanesMax = 4;  // of each direction
// Chunks that a worker holds in each direction. When they are full, the client waits.
inline constexpr uint64_t kStagingBytes = 64 * kPieceBytes;
// Messages that wait for the bytes of chunks before them.
inline constexpr size_t kHeldBytesMax = size_t{1} << 20;

// Kinds of frames beside replies. The header word is the same.
inline constexpr uint16_t kFrameProgress = 0x100;  // completed, failed, heartbeat
inline constexpr uint16_t kFrameData =
    0x101;  // bytes, lane: the next kCopyOut; lane 0: they follow
inline constexpr uint16_t kFrameGoodbye = 0x102;  // bytes, text: why the worker ends the session
inline constexpr size_t kGoodbyeBytesMax = 4096;
inline constexpr uint16_t kFrameMoment = 0x105;  // event, ns, ns waited: when it was passed

inline constexpr uint64_t frameWord(uint16_t kind, uint32_t bytes) {
  return wire::headerWord(static_cast<wire::Kind>(kind), bytes, 0);
}

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

// What a reader asks of a peer, on a connection of purpose kRead. The peer answers with kFrameData,
// each one in place of the one before, and then kFrameEnd.
struct ReadRequest {
  uint64_t base, offset, bytes;
  uint64_t written, exported;  // sequence numbers at the peer; see worker/peers/peers.h
  uint64_t reading;            // the reader's message that asks
  bool operator==(const ReadRequest&) const = default;
};
static_assert(sizeof(ReadRequest) == 48);
inline constexpr uint16_t kFrameWait = 0x104;  // the peer lives and is not there yet
inline constexpr uint16_t kFrameEnd = 0x103;  // 1: the last data is the segment's; 0: there is none

}  // namespace shoal::network
