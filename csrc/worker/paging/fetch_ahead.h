// Asks other machines for what the coming messages will copy from there, so that it comes while the
// device computes. The client is ahead of the device: its op stream says what will be wanted.
//
// As in lookahead.h, what is seen is a hint: a message is checked when it runs, and takes what came
// only if that is just what it would have asked for.
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

  // Message `sequence` has run, and the next one has not begun: nothing that is asked for now comes
  // before a copy that was not.
  void after(uint64_t sequence);

 private:
  // False if it is a copy for which there is no room now.
  bool see(wire::Words message, uint64_t sequence);

  const transport::RingConsumer& requests_;
  const Peers& peers_;
  uint64_t cursor_ = 0;  // bytes of the ring that were seen
  uint64_t next_sequence_ = 1;
  std::vector<uint64_t> message_;
  std::deque<std::pair<uint64_t, uint32_t>> asked_;  // by which message, and whom
};

}  // namespace shoal::worker
