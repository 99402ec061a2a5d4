#include "worker/process/ring_replies.h"

#include <stdexcept>
#include <string>

#include "wire/limits.h"
#include "wire/replies.h"

namespace shoal::worker {

RingReplies::RingReplies(std::byte* region, transport::Progress& progress,
                         transport::Liveness liveness)
    : progress_(progress), ring_(region, wire::kReplyRingBytes, std::move(liveness)) {}

void RingReplies::send(wire::Kind kind, wire::ErrorKind error, uint64_t sequence,
                       const std::vector<uint64_t>& payload) {
  put(kind, error, sequence, payload, /*done=*/true);
}

void RingReplies::sendEarly(wire::Kind kind, wire::ErrorKind error, uint64_t sequence,
                            const std::vector<uint64_t>& payload) {
  put(kind, error, sequence, payload, /*done=*/false);
  transport::ringForAll(progress_);  // a link that waits for the message to be done
}

void RingReplies::put(wire::Kind kind, wire::ErrorKind error, uint64_t sequence,
                      const std::vector<uint64_t>& payload, bool done) {
  const wire::Reply reply{static_cast<uint16_t>(error), sequence, payload};
  const size_t bytes = (1 + wire::wordsOf(reply)) * 8;
  if (bytes > wire::kMessageBytesMax) {
    throw std::length_error("a reply of " + std::to_string(bytes) + " bytes is too large");
  }
  const std::lock_guard lock(mutex_);
  uint64_t* words = ring_.reserve(bytes);
  words[0] = wire::headerWord(kind, static_cast<uint32_t>(bytes), reply.flags);
  wire::write(reply, words + 1);
  if (done) {
    // A client that has the reply must find its request done. A reply reports any failure, so none
    // is left.
    progress_.failed.store(0, std::memory_order_relaxed);
    transport::publish(progress_, sequence);
  }
  ring_.commit(bytes);
}

}  // namespace shoal::worker
