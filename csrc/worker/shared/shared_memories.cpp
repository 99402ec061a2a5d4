#include "worker/shared/shared_memories.h"

#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>

#include "transport/shared_passing.h"
#include "wire/cursor.h"
#include "wire/limits.h"

namespace shoal::worker {
namespace {

constexpr auto kTakeWait = std::chrono::seconds(2);  // it was sent before the message that names it

}  // namespace

void SharedMemories::receive(int socket) {
  transport::SharedPassing passing;
  const auto came = transport::receiveShared(socket, passing);
  SharedFds fds(came.fds[0], came.fds[1], came.fds[2]);
  if (came.again) return;
  if (!came.whole) {
    throw wire::ProtocolError("bytes came on the session's socket that pass no shared memory");
  }
  const std::lock_guard lock(mutex_);
  if (arrived_.size() >= wire::kSharedArrivingMax ||
      !arrived_.emplace(passing.number, std::move(fds)).second) {
    throw wire::ProtocolError("too many shared memories came, or one came twice");
  }
  came_.notify_all();
}

SharedFds SharedMemories::take(uint64_t number) {
  std::unique_lock lock(mutex_);
  if (!came_.wait_for(lock, kTakeWait, [&] { return arrived_.count(number) > 0; })) {
    throw wire::ProtocolError("no shared memory came under number " + std::to_string(number));
  }
  const auto found = arrived_.find(number);
  SharedFds fds = std::move(found->second);
  arrived_.erase(found);
  return fds;
}

}  // namespace shoal::worker
