// Publishes where this device's segments are, so that the client and the other devices of the lease
// read them in place. Without a table it does nothing.
#pragma once

#include "memory/shared_memory.h"
#include "transport/location_table.h"
#include "worker/paging/segment.h"

namespace shoal::worker {

class Locations {
 public:
  // Offsets count in `arena`, the memory that peers map, or in `host`.
  Locations(transport::LocationTable* table, const memory::SharedMemory* arena,
            const memory::SharedMemory* host)
      : table_(table), arena_(arena), host_(host) {}

  void publish(const Segment& segment) {
    if (table_ == nullptr) return;
    const auto* data =
        segment.bound ? static_cast<const std::byte*>(segment.storage.data()) : nullptr;
    if (arena_ != nullptr && data != nullptr && arena_->contains(data)) {
      table_->set(segment.slot, false, static_cast<uint64_t>(data - arena_->data()));
    } else if (data != nullptr && host_->contains(data)) {
      table_->set(segment.slot, true, static_cast<uint64_t>(data - host_->data()));
    } else {
      table_->clear(segment.slot);
    }
  }
  // Message `exported` shows a peer where the segment is now, or a copy of it in `arena`.
  void note(uint64_t exported, const Segment& segment) {
    if (table_ != nullptr) table_->note(exported, segment.slot);
  }
  void noteCopy(uint64_t exported, const c10::Storage& copy) {
    if (table_ == nullptr) return;
    const auto* data = static_cast<const std::byte*>(copy.data());
    table_->noteAt(exported, static_cast<uint64_t>(data - arena_->data()));
  }

 private:
  transport::LocationTable* table_;
  const memory::SharedMemory* arena_;
  const memory::SharedMemory* host_;
};

}  // namespace shoal::worker
