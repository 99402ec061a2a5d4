#include "client/call/call_messages.h"

#include <algorithm>
#include <cstring>

namespace shoal::client {

using wire::Kind;

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

namespace {

void appendOutputs(std::vector<uint64_t>& words, const std::vector<OutputMeta>& outputs) {
  for (const auto& output : outputs) {
    words.push_back(wire::tagWord(static_cast<wire::Tag>(output.kind),
                                  static_cast<uint8_t>(output.dtype),
                                  static_cast<uint8_t>(output.sizes.size()), 0, output.number));
    words.insert(words.end(), output.sizes.begin(), output.sizes.end());
    words.insert(words.end(), output.strides.begin(), output.strides.end());
  }
}

}  // namespace

void postPrepare(Stream& stream, const OperatorInfo& info, c10::ArrayRef<uint64_t> key,
                 const CachedCall& cached, const Lock& held) {
  std::vector<uint64_t> outputs;
  appendOutputs(outputs, cached.outputs);
  const std::string& name = info.name;
  const size_t name_words = (name.size() + 7) / 8;
  uint64_t* out =
      stream.begin(Kind::kPrepare, 2 + name_words + key.size() + outputs.size(), 0, held);
  *out++ = wire::pair(cached.id, static_cast<uint32_t>(name.size()));
  *out++ = wire::pair(static_cast<uint32_t>(key.size()), static_cast<uint32_t>(outputs.size()));
  if (name_words > 0) out[name_words - 1] = 0;
  std::memcpy(out, name.data(), name.size());
  out = std::copy(key.begin(), key.end(), out + name_words);
  std::copy(outputs.begin(), outputs.end(), out);
  stream.commit(held);
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
  const size_t graph_words = call.graph != 0 ? 1 : 0;
  const uint16_t flags = call.flags | (call.graph != 0 ? wire::kFlagRecord : 0);
  uint64_t* out = stream.begin(
      Kind::kCall, 1 + graph_words + call.immediates.size() + call.made.size(), flags, held);
  *out++ = wire::pair(id, static_cast<uint32_t>(call.made.size()));
  if (call.graph != 0) *out++ = call.graph;
  out = std::copy(call.immediates.begin(), call.immediates.end(), out);
  std::copy(call.made.begin(), call.made.end(), out);
  const uint64_t sequence = stream.commit(held);
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
