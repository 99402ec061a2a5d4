// The near future of a stream: which segments its coming messages use, and which they free. Pure.
//
// It is a hint. The executor checks a message when it runs, not when it is added here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <utility>

namespace shoal::worker {

class UpcomingUses {
 public:
  struct Event {
    uint64_t sequence;
    bool frees;
    uint64_t after_blind;  // the last message before it whose uses are not known
  };

  // Drops the events of all messages before `sequence`.
  void forget(uint64_t sequence) {
    while (!order_.empty() && order_.front().first < sequence) {
      const auto found = by_slot_.find(order_.front().second);
      found->second.pop_front();
      if (found->second.empty()) by_slot_.erase(found);
      order_.pop_front();
    }
  }
  // The message that add() and addBlind() describe. Messages that are skipped use nothing.
  void setEnd(uint64_t sequence) { end_ = sequence; }
  uint64_t end() const { return end_; }
  void add(uint32_t slot, bool frees) {
    by_slot_[slot].push_back({end_, frees, last_blind_});
    order_.emplace_back(end_, slot);
  }
  // Message `sequence` may use any segment.
  void addBlind(uint64_t sequence) { last_blind_ = sequence; }

  // The next event of a segment, or null if none is known.
  const Event* next(uint32_t slot) const {
    const auto found = by_slot_.find(slot);
    return found == by_slot_.end() ? nullptr : &found->second.front();
  }
  // Whether the segment is freed before message `now` or a later one uses it.
  bool isDead(uint32_t slot, uint64_t now) const {
    const Event* event = next(slot);
    return event != nullptr && event->frees && event->after_blind < now;
  }
  // (sequence, slot) of all events, in the order of the stream.
  const std::deque<std::pair<uint64_t, uint32_t>>& order() const { return order_; }

 private:
  uint64_t end_ = 1;
  uint64_t last_blind_ = 0;
  std::unordered_map<uint32_t, std::deque<Event>> by_slot_;
  std::deque<std::pair<uint64_t, uint32_t>> order_;
};

}  // namespace shoal::worker
