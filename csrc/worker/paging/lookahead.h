// Reads the coming messages in the ring. The client is ahead of the device, so its op stream holds
// the near future: which segments are used next, and which are freed before they are used again.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "transport/ring.h"
#include "wire/messages.h"
#include "worker/paging/upcoming_uses.h"

namespace shoal::worker {

class Lookahead {
 public:
  // Takes the number of a prepared call. Returns which words of its immediates are addresses, or
  // null if there is no such call.
  using AddressWords = std::function<const std::vector<uint32_t>*(uint32_t)>;

  Lookahead(const transport::RingConsumer& requests, AddressWords address_words)
      : requests_(requests), address_words_(std::move(address_words)) {}

  // Message `sequence` is about to run: forgets the messages before it, and reads new ones.
  void advance(uint64_t sequence);
  const UpcomingUses& uses() const { return uses_; }

 private:
  void see(wire::Words message);
  void seeCall(const wire::Call& call);
  void add(uint64_t address, bool frees);

  const transport::RingConsumer& requests_;
  AddressWords address_words_;
  uint64_t cursor_ = 0;  // bytes of the ring that were read
  std::vector<uint64_t> message_;
  UpcomingUses uses_;
};

}  // namespace shoal::worker
