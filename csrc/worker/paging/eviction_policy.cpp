#include "worker/paging/eviction_policy.h"

namespace shoal::worker {
namespace {

constexpr uint64_t kReservePart = 32;  // of the limit, that can leave at once
constexpr double kCleanFactor = 2.0;   // how much nearer a next use may be without a write
constexpr double kUnknown = 1e15;      // further than any use that is known or learned
constexpr double kDead = 1e18;
constexpr size_t kLookMax = 64;  // coming uses that nextPrefetch() looks at
// How early a segment may come. The segment that makes room for it is away for so much longer: a
// loop of L messages moves L / (L - this) times the bytes.
constexpr uint64_t kPrefetchMessages = 6;

}  // namespace

void EvictionPolicy::enter(PagedSegment& segment) {
  swapped_.erase(segment.slot);
  segment.index = static_cast<uint32_t>(resident_.size());
  resident_.push_back(&segment);
}

void EvictionPolicy::leave(PagedSegment& segment) {
  forget(segment);
  swapped_[segment.slot] = &segment;
}

void EvictionPolicy::forget(PagedSegment& segment) {
  swapped_.erase(segment.slot);
  if (segment.index == UINT32_MAX) return;
  resident_[segment.index] = resident_.back();
  resident_[segment.index]->index = segment.index;
  resident_.pop_back();
  segment.index = UINT32_MAX;
}

// The gap that followed the last one when it occurred before; in a loop, that is the next one.
uint64_t EvictionPolicy::nextGap(const PagedSegment& segment) {
  const auto& gaps = segment.gaps;
  const auto like = [](uint32_t a, uint32_t b) { return a - a / 8 <= b && b <= a + a / 8 + 2; };
  for (size_t i = 1; i < gaps.size() && gaps[i] > 0; ++i) {
    if (like(gaps[0], gaps[i])) return gaps[i - 1];
  }
  return *std::max_element(gaps.begin(), gaps.end());
}

double EvictionPolicy::distance(const PagedSegment& segment) const {
  const auto now = static_cast<double>(now_);
  const double unused = now - static_cast<double>(segment.used_at);
  if (options_.least_recent) return unused;
  double ahead = kUnknown + unused;
  const auto* next = upcoming_ == nullptr ? nullptr : upcoming_->next(segment.slot);
  if (next != nullptr) {
    if (upcoming_->isDead(segment.slot, now_)) return kDead;
    ahead = static_cast<double>(next->sequence) - now;
  } else if (const uint64_t gap = nextGap(segment); gap > 0) {
    const double end = upcoming_ == nullptr ? now : static_cast<double>(upcoming_->end());
    ahead = std::max(static_cast<double>(segment.used_at + gap), end) - now + 1;
  }
  return segment.copied ? ahead * kCleanFactor : ahead;
}

PagedSegment* EvictionPolicy::firstUncopied(uint64_t room_bytes) {
  std::make_heap(ranked_.begin(), ranked_.end());
  const uint64_t reserve_bytes = options_.limit_bytes / kReservePart;
  for (uint64_t ready = room_bytes; ready < reserve_bytes && !ranked_.empty();) {
    std::pop_heap(ranked_.begin(), ranked_.end());
    PagedSegment* segment = ranked_.back().second;
    ranked_.pop_back();
    if (!segment->copied && !segment->in_place && !isDead(*segment)) return segment;
    ready += segment->bytes;
  }
  return nullptr;
}

EvictionPolicy::Wanted EvictionPolicy::nextPrefetch() const {
  if (swapped_.empty() || upcoming_ == nullptr) return {};
  size_t seen = 0;
  for (const auto& [when, slot] : upcoming_->order()) {
    if (++seen > kLookMax || when > now_ + kPrefetchMessages) return {};
    const auto found = swapped_.find(slot);
    if (found == swapped_.end() || when <= now_) continue;
    const auto* next = upcoming_->next(slot);
    if (next->frees || next->sequence != when) continue;
    return {found->second, static_cast<double>(when - now_) * kCleanFactor};
  }
  return {};
}

}  // namespace shoal::worker
