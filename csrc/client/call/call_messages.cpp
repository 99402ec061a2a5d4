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

void postPrepare(Stream& stream, const OperatorInfo& info, c10::ArrayRef<uint64_t> key,
                 const CachedCall& cached, const Lock& held) {
  std::vector<uint64_t> outputs;
  for (const OutputMeta& output : cached.outputs) {
    wire::appendOutput(outputs, output.kind, output.number, static_cast<uint8_t>(output.dtype),
                       output.sizes, output.strides);
  }
  stream.post(wire::Prepare{cached.id, info.name, key, outputs}, held);
}

uint64_t postCall(Session& session, Stream& stream, uint32_t id, const CallWords& call,
                  const Lock& held) {
  for (const SegmentUse& use : call.uses) {
    if (use.writes) {
      session.bringToWrite(use.base, stream, held);
    } else {
      session.bring(use.base, stream, held);
    }
  }
  const uint16_t flags = call.flags | (call.graph != 0 ? wire::kFlagRecord : 0);
  const uint64_t sequence =
      stream.post(wire::Call{flags, id, call.graph, call.immediates, call.made}, held);
  session.traceCall(call.uses, call.made, stream, held);
  for (const SegmentUse& use : call.uses) {
    if (use.writes) session.wrote(use.base, stream, sequence, held);
  }
  for (const wire::Address address : call.made) {
    if (address != 0) session.made(address, stream, sequence, held);
  }
  return sequence;
}

}  // namespace shoal::client
