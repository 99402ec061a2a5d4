// The messages of an op stream. A message is a whole number of 64-bit words:
//
//   word 0   bytes (32) | kind (16) | flags (16)      bytes counts word 0 too
//   word 1…  as listed beside each kind
//
// Messages are numbered from 1 by position on both sides; the number is the call's sequence number.
#pragma once

#include <cstdint>

namespace shoal::wire {

enum class Kind : uint16_t {
  kPad = 0,            // fills the end of a ring; has no sequence number
  kPrepare = 1,        // id|name_bytes, template_words|output_words, name, template, outputs
  kCall = 2,           // id|output_count, immediates, output addresses
  kBind = 3,           // count, addresses: names the outputs of the last learning call
  kAllocate = 4,       // address, bytes
  kFree = 5,           // addresses
  kAdopt = 6,          // address, bytes, host offset: the client's shared block becomes the segment
  kWrite = 7,          // address, bytes, data
  kCopyIn = 8,         // address, bytes, host offset
  kCopyOut = 9,        // address, bytes, host offset
  kCopyWithin = 10,    // destination, source, bytes
  kRead = 11,          // address, bytes                  -> data
  kLocate = 12,        // address, bytes: it is then where the table of places says -> nothing
  kSeed = 13,          // generator, seed
  kGeneratorGet = 14,  // generator                       -> state
  kGeneratorSet = 15,  // generator, bytes, state
  kGeneratorDrop = 16,  // generator
  kEventRecord = 17,    // event
  kEventElapsed = 18,   // start event, end event          -> ms, ms of them waited (doubles)
  kEventDrop = 19,      // event
  kSync = 20,           //                                 -> nothing
  kStats = 21,          //                                 -> counters
  kForget = 22,         // drops all prepared calls
  kBackward = 23,       // graph, gradient count, addresses -> like a learning call
  kGraphDrop = 24,      // graph
  kTrim = 25,           // gives cached memory back to the system
  kExport = 26,         // address, peer, sequence there: it reads the segment until then
  kFetch = 27,  // destination, source, bytes, peer, sequence there of the value, and of its kExport
  kGeneratorSave = 28,  // generator, address: its state becomes a segment
  kGeneratorLoad = 29,  // generator, address
  // A shared memory that was passed (transport/shared_passing.h) becomes the segment: with its
  // bytes, or, for kOpen, with those that it has. Number of the passing, ShareMode, participant.
  kShare = 30,       // address, bytes, number, mode, participant -> nothing
  kOpen = 31,        // address, bytes, number, mode, participant -> nothing
  kUnshare = 32,     // address: the segment moves back to memory of this session alone -> nothing
  kEventQuery = 33,  // event, or 0: all before this -> 1 if the device is past it
  // As kFetch, but what comes is added to what is there.
  kFetchAdd = 34,  // the words of kFetch, at::ScalarType
  kLoad = 35,      // address, bytes, reader, offset in its memory: what it has read there
  kLast = kLoad,
};

// Flags of kCall.
inline constexpr uint16_t kFlagLearn = 1;   // reply with the outputs' metadata; kBind follows
inline constexpr uint16_t kFlagRecord = 2;  // with kFlagLearn: keep the autograd graph, word last
inline constexpr uint16_t kFlagLeaseRandom =
    4;  // draws from the lease's generator, not the device's

// Whether the worker answers such a message.
inline constexpr bool expectsReply(Kind kind, uint16_t flags) {
  switch (kind) {
    case Kind::kRead:
    case Kind::kLocate:
    case Kind::kGeneratorGet:
    case Kind::kEventElapsed:
    case Kind::kEventQuery:
    case Kind::kSync:
    case Kind::kStats:
    case Kind::kShare:
    case Kind::kOpen:
    case Kind::kUnshare:
      return true;
    case Kind::kCall:
      return (flags & kFlagLearn) != 0;
    default:
      return false;
  }
}

// Random numbers of `torch.device("shoal")` where a lease has several devices: one generator that
// goes to where it is needed. Generator 0 is each device's own.
inline constexpr uint64_t kLeaseGenerator = 1;
inline constexpr uint64_t kFirstUserGenerator = 2;
// A saved generator is a segment of this size: bytes of the state, then the state.
inline constexpr uint64_t kGeneratorBytes = 8192;

// What the sessions that share a segment may do with it.
enum class ShareMode : uint64_t {
  kRead = 0,       // all read, nobody writes
  kExclusive = 1,  // one at a time reads and writes
};

enum class ErrorKind : uint16_t {
  kNone = 0,
  kRuntime = 1,
  kIndex = 2,
  kValue = 3,
  kType = 4,
  kNotImplemented = 5,
  kOutOfMemory = 6,
  kLinAlg = 7,
  kProtocol = 8,       // the client broke the protocol: a bug, or an attack
  kPoisoned = 9,       // the value was to be made by a call that failed before
  kPeerFailed = 10,    // the value was to come from another device of the lease, where it failed
  kPeerLost = 11,      // another device of the lease was lost while its data was waited for
  kShareRefused = 12,  // shared memory was used in a way that its sharing forbids
  kShareRevoked = 13,  // shared memory whose owner has ended, or no longer shares it
};

inline constexpr uint64_t headerWord(Kind kind, uint32_t bytes, uint16_t flags) {
  return uint64_t{bytes} | (uint64_t{static_cast<uint16_t>(kind)} << 32) | (uint64_t{flags} << 48);
}
inline constexpr uint32_t headerBytes(uint64_t word) {
  return static_cast<uint32_t>(word);
}
inline constexpr uint16_t headerKind(uint64_t word) {
  return static_cast<uint16_t>(word >> 32);
}
inline constexpr uint16_t headerFlags(uint64_t word) {
  return static_cast<uint16_t>(word >> 48);
}

inline constexpr uint64_t pair(uint32_t low, uint32_t high) {
  return uint64_t{low} | (uint64_t{high} << 32);
}
inline constexpr uint32_t low(uint64_t word) {
  return static_cast<uint32_t>(word);
}
inline constexpr uint32_t high(uint64_t word) {
  return static_cast<uint32_t>(word >> 32);
}

// A reply: word 0 as above with kind = the request's kind and flags = ErrorKind; word 1 = the
// request's sequence number; then the payload. An error's payload: failed call's number, the
// message in which the failure showed (0: the request itself), text bytes, name bytes,
// text, name. The name is the operator's; with kPeerLost it is the lost device's.

// Tags of a call's template: what a prepared call says about each argument. The template is also
// the key of the client's call cache, so it holds everything that decides the outputs' metadata and
// nothing else. What is left out travels with each call as an immediate.
enum class Tag : uint8_t {
  kNone = 0,
  kUndefined = 1,    // an undefined tensor
  kTensor = 2,       // a=dtype b=dims c=flags; sizes, strides       immediate: address
  kHostScalar = 3,   // a=dtype c=flags                              immediate: 2 words of value
  kInt = 4,          // value
  kIntFree = 5,      //                                              immediate: value
  kFloat = 6,        //                                              immediate: value
  kFloatKeyed = 7,   // value
  kComplex = 8,      //                                              immediate: real, imaginary
  kBool = 9,         // a=value
  kString = 10,      // n=bytes; text
  kList = 11,        // n=items; items
  kDevice = 12,      // the session's own device
  kGenerator = 13,   //                                              immediate: generator
  kHostTensor = 14,  // a=dtype b=dims n=bytes; sizes, data: a small CPU tensor that stays one
  kLast = kHostTensor,
};

// Flags of kTensor and kHostScalar.
inline constexpr uint8_t kTensorConj = 1;
inline constexpr uint8_t kTensorNeg = 2;
inline constexpr uint8_t kTensorWrapped = 4;  // a Python number in a tensor's clothes
inline constexpr uint8_t kTensorRequiresGrad = 8;

inline constexpr uint64_t tagWord(Tag tag, uint8_t a = 0, uint8_t b = 0, uint8_t c = 0,
                                  uint32_t n = 0) {
  return uint64_t{static_cast<uint8_t>(tag)} | (uint64_t{a} << 8) | (uint64_t{b} << 16) |
         (uint64_t{c} << 24) | (uint64_t{n} << 32);
}
inline constexpr uint8_t tagOf(uint64_t word) {
  return static_cast<uint8_t>(word);
}
inline constexpr uint8_t tagA(uint64_t word) {
  return static_cast<uint8_t>(word >> 8);
}
inline constexpr uint8_t tagB(uint64_t word) {
  return static_cast<uint8_t>(word >> 16);
}
inline constexpr uint8_t tagC(uint64_t word) {
  return static_cast<uint8_t>(word >> 24);
}

// What a prepared call (or the reply to a learning call) says about each flattened output.
enum class OutputKind : uint8_t {
  kFresh = 0,      // a=dtype b=dims; sizes, strides: a new dense storage from offset 0
  kUndefined = 1,  //
  kArgument = 2,   // n=argument: the mutated argument itself
  kScalar = 3,     // an IValue that is no tensor: a Tag word and its value words
  kList = 4,       // n=items: the outputs that follow form a list
  kResized = 5,    // n=argument a=dtype b=dims; sizes, strides: an `out=` that was resized
};

}  // namespace shoal::wire
