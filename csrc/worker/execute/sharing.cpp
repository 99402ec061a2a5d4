// The executor's messages about memory that several sessions share.
#include "base/byte_units.h"
#include "wire/limits.h"
#include "worker/execute/executor.h"
#include "worker/failure/failure.h"

namespace shoal::worker {

using wire::ProtocolError;
using wire::Reader;
using wire::ShareMode;

Executor::Sharing Executor::readSharing(Reader& reader, bool owner) {
  Sharing sharing;
  sharing.address = reader.word("address");
  sharing.bytes = reader.word("bytes");
  sharing.number = reader.word("number");
  const uint64_t mode = reader.word("mode");
  sharing.role = {static_cast<ShareMode>(mode), reader.word("participant"), owner};
  reader.finish("sharing");
  if (mode > static_cast<uint64_t>(ShareMode::kExclusive) || sharing.role.participant == 0) {
    throw ProtocolError("a way of sharing that does not exist");
  }
  if (sharing.bytes == 0) throw ProtocolError("a segment without bytes cannot be shared");
  if (shared_ == nullptr || !memory_.isHost()) {
    throw ProtocolError("the memory of this device cannot be shared");
  }
  return sharing;
}

std::shared_ptr<SharedBlock> Executor::takeShared(const Sharing& sharing) {
  SharedFds fds = shared_->take(sharing.number);
  // Shared memory cannot leave the device, so all of it together must fit.
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      sharing.bytes <= memory_bytes_ && segments_.sharedBytes() <= memory_bytes_ - sharing.bytes,
      "the device is out of memory. Shared tensors stay in its memory: ",
      memory::readable(segments_.sharedBytes()), " are shared, ", memory::readable(sharing.bytes),
      " more do not fit its ", memory::readable(memory_bytes_), ".");
  TORCH_CHECK(segments_.sharedCount() < wire::kSharedMax, "a session shares at most ",
              wire::kSharedMax, " tensors");
  return std::make_shared<SharedBlock>(std::move(fds), sharing.bytes, sharing.role);
}

void Executor::share(Reader& reader) {
  const Sharing sharing = readSharing(reader, /*owner=*/true);
  const Range range = deviceRange(sharing.address, sharing.bytes, false);
  const Place place = segments_.resolve(sharing.address, sharing.bytes);
  if (place.offset != 0 || place.segment->bytes != sharing.bytes ||
      place.segment->shared != nullptr) {
    throw ProtocolError("only a whole segment can be shared, and only once");
  }
  const auto block = takeShared(sharing);
  block->fill(range.data);
  segments_.share(sharing.address, block, sharing.bytes);
}

void Executor::open(Reader& reader) {
  const Sharing sharing = readSharing(reader, /*owner=*/false);
  try {
    const uint64_t limit = memory_bytes_ + segments_.swapBytes();
    TORCH_CHECK_WITH(
        OutOfMemoryError, sharing.bytes <= limit && segments_.boundBytes() <= limit - sharing.bytes,
        "the lease is out of memory. Tried to open ", memory::readable(sharing.bytes), "; ",
        memory::readable(segments_.boundBytes()), " of ", memory::readable(limit), " are in use.");
    segments_.share(sharing.address, takeShared(sharing), sharing.bytes);
  } catch (...) {
    segments_.poison(sharing.address, describe(std::current_exception(), sequence_, "open"));
    throw;
  }
}

void Executor::unshare(Reader& reader) {
  const wire::Address address = reader.word("address");
  reader.finish("unshare");
  const uint64_t bytes = segments_.resolve(address, 0).segment->bytes;
  segments_.bind(address, segments_.unshared(address), bytes);
}

}  // namespace shoal::worker
