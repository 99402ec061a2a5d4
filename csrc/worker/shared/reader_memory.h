// The memory in which a reader at this node puts samples for the session: a process that the device
// server started beside the worker. It comes in one thread and is used in another. A reader that
// has died may be followed by another; messages that name the one before may still be on their way.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "memory/shared_memory.h"

namespace shoal::worker {

class ReaderMemory {
 public:
  // `wait` is for a memory that was passed before the client knew of its reader, to come.
  explicit ReaderMemory(std::chrono::milliseconds wait = std::chrono::seconds(2)) : wait_(wait) {}
  // Maps what the device server passed for reader `number`. Owns `fd`. Throws if it is no sealed
  // memory.
  void put(uint64_t number, int fd);
  // The memory of that reader; waits a moment, for it may come later than the message that names
  // it. Throws wire::ProtocolError if it does not come.
  std::shared_ptr<const memory::SharedMemory> get(uint64_t number);

 private:
  const std::chrono::milliseconds wait_;
  std::mutex mutex_;
  std::condition_variable came_;
  // By number, which begin with 1: the last two, until a message names the later one.
  std::map<uint64_t, std::shared_ptr<const memory::SharedMemory>> memories_;
};

}  // namespace shoal::worker
