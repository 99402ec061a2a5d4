// The accesses of a program, written down to ask what a pager should have done.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "client/directory/directory.h"

namespace shoal::client {

enum class Access : uint8_t { kRead = 0, kWrite = 1, kMake = 2, kFree = 3, kUpload = 4 };

struct TraceEvent {
  uint64_t call;  // events of one call need their segments together
  Access access;
  wire::Address address;
  uint64_t bytes;
  uint32_t member;
};

class AccessTrace {
 public:
  void start() {
    events_.clear();
    active_ = true;
  }
  std::vector<TraceEvent> stop() {
    active_ = false;
    return std::exchange(events_, {});
  }
  bool active() const { return active_; }

  // The next notes belong to one call.
  void beginCall() { ++calls_; }
  void note(Access access, wire::Address base, uint32_t member, const Directory& directory) {
    events_.push_back({calls_, access, base, directory.at(base).bytes, member});
  }
  // A call of `member`. What it made is 0 where it needs no memory.
  void noteCall(std::span<const SegmentUse> uses, std::span<const wire::Address> made,
                uint32_t member, const Directory& directory);

 private:
  bool active_ = false;
  uint64_t calls_ = 0;
  std::vector<TraceEvent> events_;
};

}  // namespace shoal::client
