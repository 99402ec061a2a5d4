// Lazy copies: copies between devices that are made when their target is used first.
//
// Weights that one group has updated are needed by the others layer by layer. If all of them were
// copied before the next step, every device would wait for all of them. A lazy copy is made just
// before its target's first use, in the stream of the device that uses it, and the next ones are
// made while that device computes.
//
// Callers cannot observe a lazy copy. Its target has no present bytes anywhere (`valid` is 0), so
// the first use of it makes the copy. The source keeps the bytes of the time of the copy: before
// anything changes them, the pending copies are made.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "client/directory/segment_table.h"
#include "client/directory/step.h"

namespace shoal::client {

class LazyCopies {
 public:
  LazyCopies(SegmentTable& segments, const std::vector<MemberState>& members)
      : segments_(segments), members_(members) {}

  // Whether a copy of the whole segment may be made when the target is used first.
  bool possible(wire::Address to, wire::Address from) const;
  void add(wire::Address to, wire::Address from);
  // The pending copy to `target` is made, or not needed any more: all of it changes.
  void cancel(wire::Address target);
  // The step that makes the pending copy to `target`. Any copy of the source will do.
  Step stepTo(wire::Address target);
  // Before `source` changes: the step that makes the next of its pending copies.
  Step flushStep(wire::Address source);
  // The same for a segment that is released.
  Step releaseStep(wire::Address base);
  // That step failed: a use of its target raises, if the source is what was lost.
  void lose(wire::Address target, bool source_usable);

  // What is wrong with the segment's pending copies, as source and as target; empty: nothing.
  std::string violation(wire::Address base) const;

 private:
  bool usable(int8_t member) const { return members_[static_cast<size_t>(member)].usable; }

  SegmentTable& segments_;
  const std::vector<MemberState>& members_;
  // By the slot of a source: the targets of its pending copies.
  std::unordered_map<uint32_t, std::vector<wire::Address>> pending_;
};

}  // namespace shoal::client
