// Asks other machines early for the bytes that the coming messages copy from there, so that they
// arrive while the device computes. The client is ahead of the device: its op stream names them.
//
// As in lookahead.h, this is a hint. The executor checks a message when it runs, and takes an early
// answer only if the message asks for exactly that.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "transport/ring.h"
#include "wire/messages.h"
#include "worker/peers/peers.h"

namespace shoal::worker {

class FetchAhead {
 public:
  FetchAhead(const transport::RingConsumer& requests, const Peers& peers)
      : requests_(requests), peers_(peers) {}

  // Call this between message `sequence` and the next one: then no request overtakes a copy that
  // was not asked for.
  void after(uint64_t sequence);

 private:
  // False if it is a copy for which there is no room now.
  bool see(wire::Words message, uint64_t sequence);

  const transport::RingConsumer& requests_;
  const Peers& peers_;
  uint64_t cursor_ = 0;  // bytes of the ring that were read
  uint64_t next_sequence_ = 1;
  std::vector<uint64_t> message_;
  std::deque<std::pair<uint64_t, uint32_t>> asked_;  // (message, peer)
};

}  // namespace shoal::worker
