// Segments larger than any device. A sharded segment consists of extents: ordinary segments that
// lie wherever there is room.
#pragma once

#include <cstdint>
#include <vector>

#include "client/space/session.h"

namespace shoal::client {

// Whether any sharded segment is alive in this program: without one, nobody pays for them.
bool anySharded();

// How large an extent may be: several of them fit a device together.
inline uint64_t extentBytesMax(const Session& session) {
  return session.largestMemory() / 8;
}
// Mints a sharded segment, cut so that `row_bytes` stay together where that is possible.
wire::Address mintSharded(Session& session, uint64_t bytes, uint64_t row_bytes,
                          c10::DeviceIndex index);
// Makes existing segments the extents of a sharded one, which owns them from now on.
wire::Address joinSharded(Session& session, const std::vector<wire::Address>& bases,
                          c10::DeviceIndex index);
// Takes a sharded segment apart: the extents belong to the caller.
Extents splitSharded(Session& session, wire::Address base, const Lock&);
// The extents of a sharded segment, which live as long as it does; null for any other.
const Extents* extentsOf(Session& session, wire::Address base);

}  // namespace shoal::client
