// Decides which segments leave a full device and which come back before they are used. Pure: it
// moves no bytes and knows no clock and no torch. The worker and shoal.memory.replay both run it.
//
// Victims, in this order: segments that the stream frees before it uses them again (nothing is
// written), then those whose next use is furthest ahead. The distance is exact inside the window of
// messages that the client is ahead; beyond it the policy learns it from the gaps between earlier
// uses. A segment with a valid copy in swap space costs no write, so its distance counts double.
//
// The reserve is not empty memory, which would hold nothing that is used again. It is what can
// leave at once: free memory, and the next victims, whose bytes are already copied to swap space
// while the device computes. They stay until something else needs their memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "worker/paging/upcoming_uses.h"

namespace shoal::worker {

// What the policy knows of a segment.
struct PagedSegment {
  uint64_t bytes = 0;
  uint64_t used_at = 0;  // message that used it last
  // Messages between its last uses, latest first; 0: not known. A loop repeats them.
  std::array<uint32_t, 8> gaps{};
  uint32_t slot = 0;
  uint32_t index = UINT32_MAX;  // among the resident segments
  bool copied = false;          // swap space has its present bytes, or is getting them
  bool in_place = false;        // its memory is host memory: leaving the device copies nothing
};

struct PolicyOptions {
  uint64_t limit_bytes = 0;   // of the device
  bool least_recent = false;  // plain LRU on demand, to compare with
};

class EvictionPolicy {
 public:
  static constexpr size_t kIncomingMax = 2;  // segments on their way in at once

  explicit EvictionPolicy(PolicyOptions options) : options_(options) {}

  void setUpcoming(const UpcomingUses* upcoming) { upcoming_ = upcoming; }
  // The message that runs. The segments that it uses do not leave.
  void setNow(uint64_t sequence) { now_ = sequence; }
  uint64_t now() const { return now_; }
  // Segments leave and come only when memory is short.
  bool onDemand() const { return options_.least_recent; }
  void use(PagedSegment& segment) const {
    if (now_ == segment.used_at) return;
    if (segment.used_at > 0) {
      std::copy_backward(segment.gaps.begin(), segment.gaps.end() - 1, segment.gaps.end());
      segment.gaps[0] = static_cast<uint32_t>(now_ - segment.used_at);
    }
    segment.used_at = now_;
  }

  // A segment is in the device's memory, is in swap space only, or is gone.
  void enter(PagedSegment& segment);
  void leave(PagedSegment& segment);
  void forget(PagedSegment& segment);
  const std::vector<PagedSegment*>& resident() const { return resident_; }

  // How far ahead the next use is, in messages. The largest distance leaves first.
  double distance(const PagedSegment& segment) const;
  // Whether the stream frees the segment before it uses it again.
  bool isDead(const PagedSegment& segment) const {
    return upcoming_ != nullptr && !options_.least_recent && upcoming_->isDead(segment.slot, now_);
  }

  // The segment to evict: of those that `can_leave` allows, the one with the largest distance above
  // `further_than`; null if there is none.
  template <typename CanLeave>
  PagedSegment* victim(double further_than, const CanLeave& can_leave) const {
    PagedSegment* best = nullptr;
    double furthest = further_than;
    for (PagedSegment* segment : resident_) {
      if (segment->used_at >= now_ || !can_leave(*segment)) continue;
      const double ahead = distance(*segment);
      if (ahead > furthest) {
        furthest = ahead;
        best = segment;
      }
    }
    return best;
  }

  // The segment to copy to swap space next, so that the reserve can leave at once; null if the
  // reserve is full, with `room_bytes` free.
  template <typename CanLeave>
  PagedSegment* nextCopy(uint64_t room_bytes, const CanLeave& can_leave) {
    ranked_.clear();
    for (PagedSegment* segment : resident_) {
      if (segment->used_at >= now_ || !can_leave(*segment)) continue;
      if (const double ahead = distance(*segment); ahead > 1.0)
        ranked_.emplace_back(ahead, segment);
    }
    return firstUncopied(room_bytes);
  }

  struct Wanted {
    PagedSegment* segment = nullptr;
    double further_than = 0;  // only segments with a larger distance may make room for it
  };
  // The segment in swap space to bring in next.
  Wanted nextPrefetch() const;

 private:
  static uint64_t nextGap(const PagedSegment& segment);
  PagedSegment* firstUncopied(uint64_t room_bytes);

  PolicyOptions options_;
  const UpcomingUses* upcoming_ = nullptr;
  uint64_t now_ = 0;
  std::vector<PagedSegment*> resident_;
  std::unordered_map<uint32_t, PagedSegment*> swapped_;   // by slot
  std::vector<std::pair<double, PagedSegment*>> ranked_;  // scratch of nextCopy()
};

}  // namespace shoal::worker
