#include "client/call/call_messages.h"

namespace shoal::client {

uint64_t freshBytes(c10::ArrayRef<OutputMeta> outputs) {
  uint64_t total = 0;
  for (const auto& output : outputs) total += output.bytes;
  return total;
}

uint64_t largestBytes(c10::ArrayRef<OutputMeta> outputs) {
  uint64_t largest = 0;
  for (const auto& output : outputs) largest = std::max(largest, output.bytes);
  return largest;
}

void postPrepare(Member& member, const OperatorInfo& info, c10::ArrayRef<uint64_t> key,
                 const CachedCall& cached, const Lock& held) {
  std::vector<uint64_t> outputs;
  for (const OutputMeta& output : cached.outputs) {
    wire::appendOutput(outputs, output.kind, output.number, static_cast<uint8_t>(output.dtype),
                       output.sizes, output.strides);
  }
  member.post(wire::Prepare{cached.id, info.name, key, outputs}, held);
}

uint64_t postCall(Session& session, Member& member, uint32_t id, const CallWords& call,
                  const Lock& held) {
  for (const SegmentUse& use : call.uses) {
    if (use.writes) {
      session.bringToWrite(use.base, member, held);
    } else {
      session.bring(use.base, member, held);
    }
  }
  const uint16_t flags = call.flags | (call.graph != 0 ? wire::kFlagRecord : 0);
  const uint64_t sequence =
      member.post(wire::Call{flags, id, call.graph, call.immediates, call.made}, held);
  session.traceCall(call.uses, call.made, member, held);
  for (const SegmentUse& use : call.uses) {
    if (use.writes) session.wrote(use.base, member, sequence, held);
  }
  for (const wire::Address address : call.made) {
    if (address != 0) session.made(address, member, sequence, held);
  }
  return sequence;
}

}  // namespace shoal::client
