// Sharded segments: which extents each of them consists of.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "client/directory/segment_table.h"

namespace shoal::client {

// A shard of a segment that is larger than any device: an ordinary segment of its own.
struct Extent {
  wire::Address base;
  uint64_t start;  // in the sharded segment
  uint64_t bytes;
};
using Extents = std::vector<Extent>;  // without gaps, in order

// A sharded segment has an address and a size. Only its extents are live, placed and counted.
class ExtentTable {
 public:
  explicit ExtentTable(SegmentTable& segments) : segments_(segments) {}

  // A new sharded segment of these extents. Returns 0 if no slot is left.
  wire::Address join(Extents extents, int pinned);
  // The sharded segment is no more. Its extents are ordinary segments again.
  Extents split(wire::Address base);
  // Null if the segment is not sharded.
  const Extents* of(wire::Address base) const {
    if (extents_.empty()) return nullptr;
    const auto found = extents_.find(wire::slotOf(base));
    return found == extents_.end() ? nullptr : found->second.get();
  }
  // What is wrong with a sharded segment; empty: nothing.
  std::string violation() const;

 private:
  SegmentTable& segments_;
  std::unordered_map<uint32_t, std::unique_ptr<Extents>> extents_;  // by slot
};

}  // namespace shoal::client
