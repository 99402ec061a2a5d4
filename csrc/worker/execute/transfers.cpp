#include "worker/execute/transfers.h"

#include "wire/cursor.h"

namespace shoal::worker {

using wire::ProtocolError;

void Transfers::adopt(const wire::Adopt& message) {
  std::byte* host = memory_.hostRange(message.host, message.bytes);
  if (memory_.runsLate()) throw ProtocolError("only a CPU device can adopt host memory");
  memory_.requireRoom(message.bytes, "allocate");
  memory_.segments().adopt(message.address, host, message.bytes);
  in_bytes_ += message.bytes;
}

void Transfers::write(const wire::Write& message) {
  memory_.put(message.address, message.data.data(), message.data.size());
  in_bytes_ += message.data.size();
}

void Transfers::copyIn(const wire::CopyIn& message) {
  const std::byte* host = memory_.hostRange(message.host, message.bytes);
  memory_.copyIn(message.address, host, message.bytes);
  in_bytes_ += message.bytes;
}

void Transfers::copyOut(const wire::CopyOut& message) {
  std::byte* host = memory_.hostRange(message.host, message.bytes);
  memory_.copyOut(host, message.address, message.bytes);
  out_bytes_ += message.bytes;
}

void Transfers::copyWithin(const wire::CopyWithin& message, uint64_t sequence) {
  const auto [to, from, bytes] = message;
  memory_.segments().resolve(from, bytes);
  memory_.copyInto(to, bytes, sequence, [&, to = to, from = from, bytes = bytes] {
    const auto target = memory_.range(to, bytes, true);
    memory_.device().copyWithin(target.data, memory_.range(from, bytes, false).data, bytes);
  });
}

void Transfers::load(const wire::Load& message, uint64_t sequence) {
  if (reader_ == nullptr) throw ProtocolError("this session has no reader");
  const uint64_t bytes = message.bytes;
  memory_.copyInto(message.address, bytes, sequence, [&] {
    const auto from = reader_->get(message.reader);
    if (message.offset > from->bytes() || bytes > from->bytes() - message.offset) {
      throw ProtocolError("a range lies outside of the reader's memory");
    }
    memory_.put(message.address, from->data() + message.offset, bytes);
  });
  in_bytes_ += bytes;
}

std::span<const std::byte> Transfers::read(const wire::Read& message) {
  out_bytes_ += message.bytes;
  return memory_.read(message.address, message.bytes);
}

void Transfers::locate(const wire::Locate& message, const memory::SharedMemory* arena) {
  const std::byte* data = memory_.range(message.address, message.bytes, false).data;
  out_bytes_ += message.bytes;
  // The location table says where the segment is. It does not hold shared memory, of which the
  // client asks for a copy.
  const Place place = memory_.segments().resolve(message.address, message.bytes);
  if (place.segment->shared != nullptr) return;
  if ((arena == nullptr || !arena->contains(data)) && !memory_.host().contains(data)) {
    throw ProtocolError("the segment is not in shared memory");
  }
}

}  // namespace shoal::worker
