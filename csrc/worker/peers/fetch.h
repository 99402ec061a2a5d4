// What a Fetch asks of the peer that has the bytes.
#pragma once

#include "network/frames.h"
#include "wire/messages.h"

namespace shoal::worker {

inline wire::Address baseOf(const wire::Fetch& fetch) {
  return fetch.from - fetch.from % wire::kSlotBytes;
}
// [at, + bytes) of the fetch, which is the reader's message `reading`.
inline network::ReadRequest requestOf(const wire::Fetch& fetch, uint64_t reading, uint64_t at,
                                      uint64_t bytes) {
  const uint64_t offset = fetch.from - baseOf(fetch) + at;
  return {baseOf(fetch), offset, bytes, fetch.written, fetch.exported, reading};
}
inline network::ReadRequest requestOf(const wire::Fetch& fetch, uint64_t reading) {
  return requestOf(fetch, reading, 0, fetch.bytes);
}

}  // namespace shoal::worker
