// A CPU device's memory: one shared region that serves every allocation torch makes in this worker,
// results and temporaries alike. The client maps the same region, so it reads results in place.
#pragma once

#include <c10/core/Allocator.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "memory/block_allocator.h"
#include "memory/shared_memory.h"

namespace shoal::worker {

class Arena final : public c10::Allocator {
 public:
  Arena(memory::SharedMemory region, std::string device_name);
  ~Arena() override;

  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;

  const memory::SharedMemory& region() const { return region_; }
  size_t usedBytes() const;
  size_t reservedBytes() const;
  // Gives free pages back to the system.
  void trim();

 private:
  static void release(void* context);
  [[noreturn]] void outOfMemory(size_t bytes) const;
  void populateAhead();

  memory::SharedMemory region_;
  std::string device_name_;
  mutable std::mutex mutex_;
  memory::BlockAllocator blocks_;
  // Pages below this are present. A thread keeps it ahead of the blocks in use, because the first
  // touch of a page costs ten times a copy and would otherwise fall into the calls.
  size_t populated_ = 0;
  bool stopping_ = false;
  std::condition_variable wake_;
  std::thread populator_;
};

}  // namespace shoal::worker
