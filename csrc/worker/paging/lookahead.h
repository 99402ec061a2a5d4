// What the coming messages will use. The client is ahead of the device, so its op stream holds the
// near future: which segments are used next, and which are freed before they are used again.
//
// What is seen here is a hint. A message is checked when it runs, not when it is seen.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <unordered_map>
#include <vector>

#include "transport/ring.h"
#include "wire/messages.h"

namespace shoal::worker {

class Lookahead {
 public:
  // By number of a prepared call: which words of its immediates are addresses; null if unknown.
  using AddressWords = std::function<const std::vector<uint32_t>*(uint32_t)>;

  Lookahead(const transport::RingConsumer& requests, AddressWords address_words)
      : requests_(requests), address_words_(std::move(address_words)) {}

  struct Event {
    uint64_t sequence;
    bool frees;
    uint64_t after_blind;  // the last message before it whose uses could not be seen
  };

  // Message `sequence` is about to run: forgets what is past, and reads what is new.
  void advance(uint64_t sequence);
  // The next event of a segment, or null if the window holds none.
  const Event* next(uint32_t slot) const;
  // Whether the segment is freed before message `now`, or any after it, uses it. A message whose
  // uses were not seen may use it until it is past.
  bool isDead(uint32_t slot, uint64_t now) const {
    const Event* event = next(slot);
    return event != nullptr && event->frees && event->after_blind < now;
  }
  // Segments in the order in which they will be used, from the next message on.
  const std::deque<std::pair<uint64_t, uint32_t>>& order() const { return order_; }
  uint64_t end() const { return next_sequence_; }  // of the window

 private:
  void see(wire::Words message);
  void seeCall(const wire::Call& call);
  void add(uint64_t address, bool frees);

  const transport::RingConsumer& requests_;
  AddressWords address_words_;
  uint64_t cursor_ = 0;  // bytes of the ring that were seen
  uint64_t next_sequence_ = 1;
  uint64_t last_blind_ = 0;
  std::vector<uint64_t> message_;
  std::unordered_map<uint32_t, std::deque<Event>> by_slot_;
  std::deque<std::pair<uint64_t, uint32_t>> order_;  // (sequence, slot)
};

}  // namespace shoal::worker
