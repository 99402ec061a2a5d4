#include "worker/execute/sharing.h"

#include <c10/util/Exception.h>

#include "base/byte_units.h"
#include "wire/cursor.h"
#include "wire/limits.h"

namespace shoal::worker {

using wire::ProtocolError;

namespace {

void check(const auto& message) {
  if (message.participant == 0) throw ProtocolError("participant 0 does not exist");
  if (message.bytes == 0) throw ProtocolError("a segment without bytes cannot be shared");
}

}  // namespace

std::shared_ptr<SharedBlock> Sharing::take(const auto& message, bool owner) const {
  if (memories_ == nullptr || memory_.runsLate()) {
    throw ProtocolError("the memory of this device cannot be shared");
  }
  SharedFds fds = memories_->take(message.number);
  // It cannot be swapped out, so all of it together must fit the device.
  const uint64_t limit = memory_.limitBytes(), shared = memory_.segments().sharedBytes();
  TORCH_CHECK_WITH(OutOfMemoryError, message.bytes <= limit && shared <= limit - message.bytes,
                   "the device is out of memory. Shared tensors stay in its memory: ",
                   memory::readable(shared), " are shared, ", memory::readable(message.bytes),
                   " more do not fit its ", memory::readable(limit), ".");
  TORCH_CHECK(memory_.segments().sharedCount() < wire::kSharedMax, "a session shares at most ",
              wire::kSharedMax, " tensors");
  return std::make_shared<SharedBlock>(std::move(fds), message.bytes,
                                       ShareRole{message.mode, message.participant, owner});
}

void Sharing::share(const wire::Share& message) {
  check(message);
  const auto range = memory_.range(message.address, message.bytes, false);
  const Place place = memory_.segments().resolve(message.address, message.bytes);
  if (place.offset != 0 || place.segment->bytes != message.bytes ||
      place.segment->shared != nullptr) {
    throw ProtocolError("only a whole segment can be shared, and only once");
  }
  const auto block = take(message, /*owner=*/true);
  block->fill(range.data);
  memory_.segments().share(message.address, block, message.bytes);
}

void Sharing::open(const wire::Open& message, uint64_t sequence) {
  check(message);
  Segments& segments = memory_.segments();
  try {
    memory_.requireRoom(message.bytes, "open");
    segments.share(message.address, take(message, /*owner=*/false), message.bytes);
  } catch (...) {
    segments.poison(message.address, describe(std::current_exception(), sequence, "open"));
    throw;
  }
}

void Sharing::unshare(const wire::Unshare& message) {
  Segments& segments = memory_.segments();
  const uint64_t bytes = segments.resolve(message.address, 0).segment->bytes;
  segments.bind(message.address, segments.unshared(message.address), bytes);
}

}  // namespace shoal::worker
