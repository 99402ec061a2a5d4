#include "client/member/request_queue.h"

#include <c10/util/Exception.h>

#include "client/member/interrupts.h"
#include "client/member/reply_queue.h"
#include "wire/limits.h"

namespace shoal::client {

using wire::Kind;

namespace {

constexpr size_t kUnsentFreesMax = 64;

}  // namespace

RequestQueue::RequestQueue(const memory::SharedMemory& region, Liveness& liveness, Traffic& traffic)
    : liveness_(liveness),
      traffic_(traffic),
      ring_(region.data(), wire::kRingBytes, [&liveness] { liveness.checkAlive(); }) {}

uint64_t* RequestQueue::reserve(Kind kind, size_t words, uint16_t flags) {
  const size_t bytes = (1 + words) * 8;
  TORCH_CHECK(bytes <= wire::kMessageBytesMax, "shoal: a call with ", words,
              " words of arguments is too large for one message");
  uint64_t* message = ring_.reserve(bytes);
  message[0] = wire::headerWord(kind, static_cast<uint32_t>(bytes), flags);
  pending_bytes_ = bytes;
  return message + 1;
}

uint64_t* RequestQueue::begin(Kind kind, size_t words, uint16_t flags) {
  liveness_.checkUsable();
  if (Observer* observer = Observer::current()) observer->posted(kind);
  sendFrees();
  // What prepares a call, or names its memory, fails with the call and needs no line of its own.
  pending_named_ = kind != Kind::kPrepare && kind != Kind::kAllocate && kind != Kind::kBind;
  return reserve(kind, words, flags);
}

void RequestQueue::publish() {
  ring_.commit(pending_bytes_);
  ++traffic_.messages;
  traffic_.stream_bytes += pending_bytes_;
  ++sequence_;
}

uint64_t RequestQueue::commit() {
  publish();
  lines_.sent(sequence_, pending_named_);
  return sequence_;
}

void RequestQueue::sendFrees() {
  if (unsent_frees_.empty()) return;
  const wire::Free message{unsent_frees_};
  wire::write(message, reserve(Kind::kFree, wire::wordsOf(message), 0));
  publish();
  unsent_frees_.clear();
}

void RequestQueue::free(wire::Address address, bool now, const Lock&) {
  unsent_frees_.push_back(address);
  if (now || unsent_frees_.size() >= kUnsentFreesMax) sendFrees();
}

uint64_t RequestQueue::nextSequence(const Lock&) {
  sendFrees();
  return sequence_ + 1;
}

void RequestQueue::waitForRoom() {
  Wait wait;
  while (!ring_.awaitRoom(kSliceMs)) wait.look();
}

}  // namespace shoal::client
