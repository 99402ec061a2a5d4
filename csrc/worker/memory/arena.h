// A CPU device's memory: one shared region that serves every allocation that torch makes in this
// worker, results and temporaries alike. The client maps the same region, so it reads results in
// place.
#pragma once

#include <c10/core/Allocator.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "memory/block_allocator.h"
#include "memory/physical_memory.h"
#include "worker/memory/grant.h"

namespace shoal::worker {

// Frees memory for an allocation that finds none.
class Reclaimer {
 public:
  // Frees about `bytes`. Returns false if nothing can be freed.
  virtual bool reclaim(uint64_t bytes) = 0;

 protected:
  ~Reclaimer() = default;
};

class Arena final : public c10::Allocator {
 public:
  // At most `limit_bytes` of the region are in use at once. The region has more addresses than
  // that, so that fragmentation costs addresses and does not fail an allocation. With `grant`, the
  // device server sets a lower limit there, and changes it while the session runs.
  Arena(memory::SharedMemory region, uint64_t limit_bytes, std::string device_name,
        Grant* grant = nullptr);
  static uint64_t addressBytes(uint64_t limit_bytes) { return 2 * limit_bytes; }
  ~Arena() override;

  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;

  const memory::SharedMemory& region() const { return memory_.region(); }
  // `reclaimer` frees memory when none is left; null: an allocation fails at once.
  void setReclaimer(Reclaimer* reclaimer) { reclaimer_ = reclaimer; }
  // Counts memory of this device that lies outside of the region.
  void charge(int64_t bytes);
  uint64_t roomBytes() const;
  // Bytes in use beyond the limit, after the device server has lowered it.
  uint64_t excessBytes() const;
  Grant* grant() const { return grant_; }
  size_t usedBytes() const;
  size_t reservedBytes() const;
  // Gives free pages back to the system.
  void trim();
  // What is in use becomes the host's, while the session is suspended, or the device's again.
  // Nothing is allocated meanwhile.
  void setAside(bool aside);

 private:
  static void release(void* context);
  uint64_t used() const { return aside_ ? 0 : blocks_.usedBytes() + charged_bytes_; }
  uint64_t room() const;
  uint64_t limit() const {
    return grant_ == nullptr ? limit_bytes_ : std::min(limit_bytes_, grant_->limitBytes());
  }
  [[noreturn]] void outOfMemory(size_t bytes) const;
  void populateAhead();

  memory::SharedFrames memory_;
  uint64_t limit_bytes_;
  Grant* grant_;
  uint64_t charged_bytes_ = 0;
  Reclaimer* reclaimer_ = nullptr;
  std::string device_name_;
  mutable std::mutex mutex_;
  memory::BlockAllocator blocks_;
  // Pages below this are present. A thread keeps it ahead of the blocks in use: the first touch of
  // a page costs ten times a copy, and would otherwise slow the calls down.
  size_t populated_ = 0;
  bool stopping_ = false;
  bool aside_ = false;
  std::condition_variable wake_;
  std::thread populator_;
};

}  // namespace shoal::worker
