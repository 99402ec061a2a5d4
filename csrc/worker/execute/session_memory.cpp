#include "worker/execute/session_memory.h"

#include <c10/util/Exception.h>

#include "base/byte_units.h"
#include "wire/cursor.h"

namespace shoal::worker {

void SessionMemory::allocate(wire::Address address, uint64_t bytes, uint64_t sequence,
                             const char* what) {
  try {
    segments_.bind(address, device_.allocate(bytes), bytes);
  } catch (const transport::PeerLost&) {
    throw;  // the client is gone
  } catch (...) {
    segments_.poison(address, describe(std::current_exception(), sequence, what));
    throw;
  }
}

void SessionMemory::requireRoom(uint64_t bytes, const char* verb) const {
  const uint64_t limit = limit_bytes_ + segments_.swapBytes();
  TORCH_CHECK_WITH(OutOfMemoryError, bytes <= limit && segments_.boundBytes() <= limit - bytes,
                   "the lease is out of memory. Tried to ", verb, " ", memory::readable(bytes),
                   "; ", memory::readable(segments_.boundBytes()), " of ", memory::readable(limit),
                   " are in use.");
}

std::byte* SessionMemory::hostRange(uint64_t offset, uint64_t bytes) const {
  if (offset > host_.bytes() || bytes > host_.bytes() - offset) {
    throw wire::ProtocolError("a host range lies outside of the shared region");
  }
  return host_.data() + offset;
}

SessionMemory::Range SessionMemory::range(wire::Address address, uint64_t bytes,
                                          bool writes) const {
  const Place place = segments_.use(address, bytes, writes);
  if (place.segment->poison != nullptr) throw PoisonedError(place.segment->poison);
  const c10::Storage& storage = place.segment->storage;
  return {static_cast<std::byte*>(storage.mutable_data()) + place.offset, storage};
}

}  // namespace shoal::worker
