// The two messages of a call: what repeats, sent once, and the call itself. Used by whoever issues
// a call and by whoever repeats it on another device.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

#include "client/call/operator_info.h"
#include "client/member/call_cache.h"
#include "client/space/session.h"

namespace shoal::client {

// Storage that the outputs need beside their arguments'.
uint64_t freshBytes(c10::ArrayRef<OutputMeta> outputs);
uint64_t largestBytes(c10::ArrayRef<OutputMeta> outputs);

// Tells the member's worker of a call that is in its cache under `key`.
void postPrepare(Member& member, const OperatorInfo& info, c10::ArrayRef<uint64_t> key,
                 const CachedCall& cached, const Lock&);

// A call, but for where it runs and under which number that device knows it.
struct CallWords {
  c10::ArrayRef<uint64_t> immediates;
  c10::ArrayRef<SegmentUse> uses;
  c10::ArrayRef<wire::Address> made;  // addresses of the outputs; 0: one without memory
  uint16_t flags = 0;
  uint64_t graph = 0;  // 0: not recorded by the worker
};

// Writes the call and keeps account of the segments that it uses, changes and makes. Returns its
// sequence number.
uint64_t postCall(Session& session, Member& member, uint32_t id, const CallWords& call,
                  const Lock&);

}  // namespace shoal::client
