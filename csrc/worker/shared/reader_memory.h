// The memory into which a data reader at this node puts samples for the session. The device server
// starts the reader's process beside the worker. One thread receives the memory, another uses it.
// After a reader dies, another may follow while messages still name the one before.
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
  // `wait`: how long get() waits for memory that the device server has already passed.
  explicit ReaderMemory(std::chrono::milliseconds wait = std::chrono::seconds(2)) : wait_(wait) {}
  // Maps the memory of reader `number`. Owns `fd`. Throws if the memory is not sealed.
  void put(uint64_t number, int fd);
  // The memory of that reader. It may arrive after the message that names it, so this waits. Throws
  // wire::ProtocolError if it does not arrive.
  std::shared_ptr<const memory::SharedMemory> get(uint64_t number);

 private:
  const std::chrono::milliseconds wait_;
  std::mutex mutex_;
  std::condition_variable came_;
  // By number, from 1: the last two readers, until a message names the later one.
  std::map<uint64_t, std::shared_ptr<const memory::SharedMemory>> memories_;
};

}  // namespace shoal::worker
