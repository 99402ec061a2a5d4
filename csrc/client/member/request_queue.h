// The messages to a member's worker: the client's end of the op ring. Each message gets a sequence
// number and the line of the user's program that sent it.
#pragma once

#include <cstdint>
#include <vector>

#include "client/member/call_lines.h"
#include "client/member/liveness.h"
#include "client/member/observer.h"
#include "client/member/traffic.h"
#include "memory/shared_memory.h"
#include "transport/ring.h"
#include "wire/messages.h"

namespace shoal::client {

class RequestQueue {
 public:
  RequestQueue(const memory::SharedMemory& region, Liveness& liveness, Traffic& traffic);

  // --- The session's Lock is held.
  // Appends a message and returns its sequence number.
  template <typename M>
  uint64_t post(const M& message, const Lock&) {
    wire::write(message, begin(M::kKind, wire::wordsOf(message), wire::flagsOf(message)));
    return commit();
  }
  // The sequence number of the next message that is posted, for messages that name each other.
  uint64_t nextSequence(const Lock&);
  // Frees travel in batches before the next message; a large one goes at once.
  void free(wire::Address address, bool now, const Lock&);
  // A token for the user's line that sent the message; 0: unknown.
  uint64_t lineOf(uint64_t sequence, const Lock&) const { return lines_.of(sequence, sequence_); }
  uint64_t lastSequence() const { return sequence_; }

  // --- without the Lock
  // Waits until the worker has taken most of what was sent, so that nobody waits for it while
  // holding the Lock.
  void awaitRoom() {
    if (!ring_.hasRoom()) waitForRoom();
  }

 private:
  // Room for a message of `words` words after the header.
  uint64_t* begin(wire::Kind kind, size_t words, uint16_t flags);
  uint64_t* reserve(wire::Kind kind, size_t words, uint16_t flags);
  // Publishes what begin() gave.
  uint64_t commit();
  void publish();
  void sendFrees();
  void waitForRoom();

  Liveness& liveness_;
  Traffic& traffic_;
  transport::RingProducer ring_;
  uint64_t sequence_ = 0;
  size_t pending_bytes_ = 0;    // of the message that is being written
  bool pending_named_ = false;  // whether that message has a line of its own
  CallLines lines_;
  // Freed addresses that the worker does not know of yet. They go just before the next message, so
  // they need no publication of their own.
  std::vector<wire::Address> unsent_frees_;
};

}  // namespace shoal::client
