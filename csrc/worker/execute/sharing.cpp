// The executor's messages about memory that several sessions share.
#include "base/byte_units.h"
#include "wire/limits.h"
#include "worker/execute/executor.h"
#include "worker/failure/failure.h"

namespace shoal::worker {

using wire::ProtocolError;

namespace {

void check(const auto& message) {
  if (message.participant == 0) throw ProtocolError("participant 0 does not exist");
  if (message.bytes == 0) throw ProtocolError("a segment without bytes cannot be shared");
}

}  // namespace

std::shared_ptr<SharedBlock> Executor::takeShared(const auto& message, bool owner) {
  if (shared_ == nullptr || !memory_.isHost()) {
    throw ProtocolError("the memory of this device cannot be shared");
  }
  SharedFds fds = shared_->take(message.number);
  // It cannot be swapped out, so all of it together must fit the device.
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      message.bytes <= memory_bytes_ && segments_.sharedBytes() <= memory_bytes_ - message.bytes,
      "the device is out of memory. Shared tensors stay in its memory: ",
      memory::readable(segments_.sharedBytes()), " are shared, ", memory::readable(message.bytes),
      " more do not fit its ", memory::readable(memory_bytes_), ".");
  TORCH_CHECK(segments_.sharedCount() < wire::kSharedMax, "a session shares at most ",
              wire::kSharedMax, " tensors");
  return std::make_shared<SharedBlock>(std::move(fds), message.bytes,
                                       ShareRole{message.mode, message.participant, owner});
}

void Executor::share(const wire::Share& message) {
  check(message);
  const Range range = deviceRange(message.address, message.bytes, false);
  const Place place = segments_.resolve(message.address, message.bytes);
  if (place.offset != 0 || place.segment->bytes != message.bytes ||
      place.segment->shared != nullptr) {
    throw ProtocolError("only a whole segment can be shared, and only once");
  }
  const auto block = takeShared(message, /*owner=*/true);
  block->fill(range.data);
  segments_.share(message.address, block, message.bytes);
}

void Executor::open(const wire::Open& message) {
  check(message);
  try {
    const uint64_t limit = memory_bytes_ + segments_.swapBytes();
    TORCH_CHECK_WITH(
        OutOfMemoryError, message.bytes <= limit && segments_.boundBytes() <= limit - message.bytes,
        "the lease is out of memory. Tried to open ", memory::readable(message.bytes), "; ",
        memory::readable(segments_.boundBytes()), " of ", memory::readable(limit), " are in use.");
    segments_.share(message.address, takeShared(message, /*owner=*/false), message.bytes);
  } catch (...) {
    segments_.poison(message.address, describe(std::current_exception(), sequence_, "open"));
    throw;
  }
}

void Executor::unshare(const wire::Unshare& message) {
  const uint64_t bytes = segments_.resolve(message.address, 0).segment->bytes;
  segments_.bind(message.address, segments_.unshared(message.address), bytes);
}

}  // namespace shoal::worker
