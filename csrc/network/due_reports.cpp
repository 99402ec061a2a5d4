#include "network/due_reports.h"

#include <algorithm>

namespace shoal::network {

void DueReports::addReply(uint64_t sequence) {
  const std::lock_guard held(mutex_);
  replies_.push_back(sequence);
  wakeIfLater(sequence);
}

uint64_t DueReports::addCopy(uint64_t bytes, uint64_t sequence) {
  std::optional<uint64_t> offset;
  std::unique_lock held(mutex_);
  released_.wait(held, [&] { return (offset = out_.take(bytes, sequence)).has_value(); });
  copies_.push_back({sequence, *offset, bytes});
  wakeIfLater(sequence);
  return *offset;
}

void DueReports::addEvent(uint64_t event, uint64_t sequence) {
  const std::lock_guard held(mutex_);
  events_.push_back({sequence, event});
  if (events_.size() > transport::kMoments) events_.pop_front();
  wakeIfLater(sequence);
}

// Wakes the sender if it sleeps for a later message, or for none.
void DueReports::wakeIfLater(uint64_t sequence) {
  if (asleep_for_ > sequence) transport::ringForAll(progress_);
}

std::optional<DueReports::Copy> DueReports::takeCopy(uint64_t sequence) {
  const std::lock_guard held(mutex_);
  if (copies_.empty() || copies_.front().sequence > sequence) return std::nullopt;
  const Copy copy = copies_.front();
  copies_.pop_front();
  return copy;
}

std::optional<uint64_t> DueReports::takeEvent(uint64_t sequence) {
  const std::lock_guard held(mutex_);
  if (events_.empty() || events_.front().sequence > sequence) return std::nullopt;
  const uint64_t event = events_.front().event;
  events_.pop_front();
  return event;
}

void DueReports::replied(uint64_t sequence) {
  const std::lock_guard held(mutex_);
  while (!replies_.empty() && replies_.front() <= sequence) replies_.pop_front();
}

void DueReports::release(uint64_t sequence) {
  {
    const std::lock_guard held(mutex_);
    out_.release(sequence);
  }
  released_.notify_one();
}

DueReports::Next DueReports::sleepForNext() {
  const std::lock_guard held(mutex_);
  uint64_t next = UINT64_MAX;
  if (!copies_.empty()) next = copies_.front().sequence;
  if (!events_.empty()) next = std::min(next, events_.front().sequence);
  const bool is_reply = !replies_.empty() && replies_.front() < next;
  asleep_for_ = is_reply ? replies_.front() : next;
  return {asleep_for_, is_reply};
}

void DueReports::wokeUp() {
  const std::lock_guard held(mutex_);
  asleep_for_ = 0;
}

}  // namespace shoal::network
