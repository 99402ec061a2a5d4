#include "worker/shared/reader_memory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "wire/cursor.h"

namespace shoal::worker {

void ReaderMemory::put(uint64_t number, int fd) {
  struct stat info{};
  if (fstat(fd, &info) != 0 || info.st_size <= 0) {
    close(fd);
    throw std::runtime_error("the memory of a data reader is empty. This is a bug in Shoal.");
  }
  auto mapped = std::make_shared<const memory::SharedMemory>(
      memory::SharedMemory::attach(fd, static_cast<size_t>(info.st_size)));
  const std::lock_guard held(mutex_);
  memories_[number] = std::move(mapped);
  if (memories_.size() > 2) memories_.erase(memories_.begin());
  came_.notify_all();
}

std::shared_ptr<const memory::SharedMemory> ReaderMemory::get(uint64_t number) {
  std::unique_lock held(mutex_);
  const auto latest = [&] { return memories_.empty() ? 0 : memories_.rbegin()->first; };
  // Only the next reader's memory can still be on its way.
  if (number == latest() + 1) came_.wait_for(held, wait_, [&] { return latest() >= number; });
  const auto found = memories_.find(number);
  if (found == memories_.end()) {
    throw wire::ProtocolError("this session has no reader " + std::to_string(number));
  }
  return memories_.erase(memories_.begin(), found)->second;
}

}  // namespace shoal::worker
