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
  return rangeOf(segments_.use(address, bytes, writes));
}

SessionMemory::Range SessionMemory::rangeOf(const Place& place) const {
  if (place.segment->poison != nullptr) throw PoisonedError(place.segment->poison);
  const c10::Storage& storage = place.segment->storage;
  return {static_cast<std::byte*>(storage.mutable_data()) + place.offset, storage};
}

void SessionMemory::put(std::byte* to, const void* from, uint64_t bytes) const {
  if (late_ != nullptr) return late_->slots.copyIn(to, from, bytes);
  device_.copyIn(Lane::kCompute, to, from, bytes);
}

void SessionMemory::copyIn(wire::Address address, const std::byte* host, uint64_t bytes) const {
  if (late_ == nullptr) return put(address, host, bytes);
  const Place place = segments_.useBeside(address, bytes, true);
  late_->copyIn(place.segment->uses, rangeOf(place).data, host, bytes);
}

void SessionMemory::copyOut(std::byte* host, wire::Address address, uint64_t bytes) const {
  if (late_ == nullptr) {
    return device_.copyOut(Lane::kCompute, host, range(address, bytes, false).data, bytes);
  }
  const Place place = segments_.useBeside(address, bytes, false);
  late_->copyOut(place.segment->uses, host, rangeOf(place).data, bytes);
}

std::span<const std::byte> SessionMemory::read(wire::Address address, uint64_t bytes) const {
  const std::byte* data = range(address, bytes, false).data;
  if (late_ == nullptr) return {data, bytes};
  return late_->read(data, bytes);
}

}  // namespace shoal::worker
