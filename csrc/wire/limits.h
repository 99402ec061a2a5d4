// Every bound that Shoal puts on bytes from outside. A limit that is exceeded is an error with a
// name, never a truncation.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shoal::wire {

// Changes whenever the meaning of any message changes. Both sides name it in the handshake.
inline constexpr uint32_t kProtocolVersion = 10;

inline constexpr size_t kRingBytes = size_t{1} << 20;  // op stream, client to worker
inline constexpr size_t kMessageBytesMax = size_t{1}
                                           << 19;           // one message; must fit twice in a ring
inline constexpr size_t kReplyRingBytes = size_t{1} << 20;  // worker to client
inline constexpr size_t kInlineBytesMax = 4096;             // data that travels inside a message
inline constexpr size_t kHostTensorBytesMax = 64 * 1024;  // a CPU argument, sent with its template
inline constexpr size_t kOperatorNameBytesMax = 256;
inline constexpr size_t kErrorTextBytesMax = 16384;
inline constexpr size_t kStringBytesMax = 4096;  // a string argument of an operator
inline constexpr size_t kDimensionsMax = 64;     // torch's own limit
inline constexpr size_t kListLengthMax = 1 << 16;
inline constexpr size_t kOutputsMax = 1 << 14;                // flattened outputs of one call
inline constexpr size_t kPreparedMax = 1 << 15;               // prepared calls alive in a session
inline constexpr size_t kPreparedWordsMax = size_t{1} << 22;  // of all their templates together
inline constexpr size_t kGeneratorsMax = 4096;
inline constexpr size_t kEventsMax = 1 << 16;
inline constexpr size_t kSharedArrivingMax = 64;  // shared memories that came and were not used yet
inline constexpr size_t kSharedMax = 1024;        // segments of a session in shared memories
inline constexpr size_t kGraphsMax = 1 << 16;     // recorded graphs awaiting backward

}  // namespace shoal::wire
