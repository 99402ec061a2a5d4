#include "client/member/reply_queue.h"

#include <chrono>
#include <thread>

#include "wire/limits.h"

namespace shoal::client {
namespace {

constexpr int64_t kSpinUs = 200;    // a reply is usually this near; a sleeping core wakes in 25 µs
constexpr size_t kStashMax = 1024;  // replies for other threads: as many as may wait at once

}  // namespace

ReplyQueue::ReplyQueue(const memory::SharedMemory& region, Liveness& liveness)
    : liveness_(liveness),
      ring_(region.data(), wire::kReplyRingBytes, wire::kMessageBytesMax,
            [&liveness] { liveness.checkAlive(); }) {}

bool ReplyQueue::take(uint64_t sequence, std::vector<uint64_t>& payload, wire::ErrorKind& error) {
  std::unique_lock held(mutex_, std::try_to_lock);
  if (!held && !held.try_lock_for(std::chrono::milliseconds(kSliceMs))) return false;
  const auto take = [&](const wire::Reply& reply) {
    error = reply.error();
    payload.assign(reply.payload.begin(), reply.payload.end());
    return true;
  };
  const auto stashed = stash_.find(sequence);
  if (stashed != stash_.end()) {
    const auto reply = std::move(stashed->second);
    stash_.erase(stashed);
    return take(wire::read<wire::Reply>(reply));
  }
  if (!ring_.poll(reply_)) {
    liveness_.checkUsable();
    ring_.wait(kSpinUs, kSliceMs);
    if (!ring_.poll(reply_)) return false;
  }
  if (reply_.size() < 2) liveness_.raiseLost("it sent a malformed reply");
  const auto reply = wire::read<wire::Reply>(reply_);
  if (reply.sequence == sequence) return take(reply);
  if (unwanted_.erase(reply.sequence) == 0) {  // another thread waits for it
    if (stash_.size() >= kStashMax) liveness_.raiseLost("it sent replies that nobody asked for");
    stash_.emplace(reply.sequence, reply_);
  }
  held.unlock();
  std::this_thread::yield();
  return false;
}

void ReplyQueue::drop(uint64_t sequence) {
  const std::lock_guard held(mutex_);
  if (stash_.erase(sequence) == 0) unwanted_.insert(sequence);
}

}  // namespace shoal::client
