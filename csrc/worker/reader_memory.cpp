#include "worker/reader_memory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "wire/reader.h"

namespace shoal::worker {

void ReaderMemory::put(uint64_t number, int fd) {
  struct stat info{};
  if (fstat(fd, &info) != 0 || info.st_size <= 0) {
    close(fd);
    throw std::runtime_error("a reader's memory is none");
  }
  auto mapped = std::make_shared<const memory::SharedMemory>(
      memory::SharedMemory::attach(fd, static_cast<size_t>(info.st_size)));
  const std::lock_guard held(mutex_);
  before_ = number == number_ + 1 ? std::move(memory_) : nullptr;
  number_ = number;
  memory_ = std::move(mapped);
  came_.notify_all();
}

std::shared_ptr<const memory::SharedMemory> ReaderMemory::get(uint64_t number) {
  std::unique_lock held(mutex_);
  // Only the next one can still be on its way.
  if (number == number_ + 1) came_.wait_for(held, wait_, [&] { return number_ >= number; });
  if (number != 0 && number + 1 == number_ && before_ != nullptr) return before_;
  if (number == 0 || number != number_) {
    throw wire::ProtocolError("this session has no reader " + std::to_string(number));
  }
  return memory_;
}

}  // namespace shoal::worker
