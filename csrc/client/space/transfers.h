// Bytes between the program's memory and a segment, and between segments of one lease. A request
// holds addresses; the bytes go straight between the two memories.
//
// A range is [base + offset, + bytes) of one segment.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "client/space/session.h"

namespace shoal::client {

void upload(Session& session, wire::Address base, uint64_t offset, const void* from, uint64_t bytes,
            bool non_blocking);
void download(Session& session, wire::Address base, uint64_t offset, void* to, uint64_t bytes,
              bool non_blocking);

// Copies within the lease; between devices from worker to worker, not through the client.
void copyAcross(Session& session, wire::Address to_base, uint64_t to_offset,
                wire::Address from_base, uint64_t from_offset, uint64_t bytes);
// Adds numbers of another device of the lease, without a copy of them on the own one. False if that
// is not possible.
bool addAcross(Session& session, wire::Address to_base, uint64_t to_offset, wire::Address from_base,
               uint64_t from_offset, uint64_t bytes, c10::ScalarType type);

// Copies what data reader `reader` at the member's node has at `from` of its memory. The client
// does not see these bytes. Returns the number of the last message: after it that memory may
// change.
uint64_t load(Session& session, wire::Address base, uint64_t offset, uint64_t bytes, size_t member,
              uint64_t reader, uint64_t from);

// The bytes of a segment in the memory of each device of this machine that has them, by member.
std::vector<std::pair<uint32_t, std::string>> copiesOf(Session& session, wire::Address base);

}  // namespace shoal::client
