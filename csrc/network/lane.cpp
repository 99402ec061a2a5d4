#include "network/lane.h"

#include <utility>

#include "network/frames.h"

namespace shoal::network {
namespace {

constexpr size_t kSendingMax = 4;  // chunks of a lane that sends, the present one included

}  // namespace

bool Lane::full() const {
  return direction_ == Direction::kSend && chunks_.size() >= kSendingMax;
}

bool Lane::tryPush(Chunk& chunk) {
  {
    const std::lock_guard held(mutex_);
    if (full()) return false;
    chunks_.push_back(std::move(chunk));
  }
  changed_.notify_all();
  return true;
}

void Lane::push(Chunk chunk) {
  {
    std::unique_lock held(mutex_);
    changed_.wait(held, [&] { return !full() || stopped_; });
    if (stopped_) throw ConnectionLost("the session was closed");
    chunks_.push_back(std::move(chunk));
  }
  changed_.notify_all();
}

size_t Lane::queued() const {
  const std::lock_guard held(mutex_);
  return chunks_.size();
}

void Lane::run() {
  while (true) {
    Chunk chunk;
    bool more;
    {
      std::unique_lock held(mutex_);
      changed_.wait(held, [&] { return !chunks_.empty() || stopped_; });
      if (stopped_) return;
      chunk = chunks_.front();
      more = chunks_.size() > 1;
    }
    carry(chunk, more);
    chunk.done();
    {
      const std::lock_guard held(mutex_);
      chunks_.pop_front();
    }
    changed_.notify_all();
  }
}

void Lane::carry(const Chunk& chunk, bool more) {
  if (direction_ == Direction::kSend) {
    connection_->write(chunk.data, chunk.bytes);
    if (!more) connection_->flush();
    return;
  }
  for (uint64_t at = 0; at < chunk.bytes;) {
    at += connection_->readSome(chunk.data + at, chunk.bytes - at);
  }
}

void Lane::stop() noexcept {
  {
    const std::lock_guard held(mutex_);
    stopped_ = true;
  }
  connection_->shutdown();
  changed_.notify_all();
}

uint32_t chooseLane(const Lanes& lanes, uint64_t bytes) {
  if (bytes < kChunkBytes) return 0;
  uint32_t best = 0;
  size_t least = SIZE_MAX;
  for (size_t i = 0; i < lanes.size(); ++i) {
    const size_t queued = lanes[i]->queued();
    if (queued < least) {
      least = queued;
      best = static_cast<uint32_t>(i + 1);
    }
  }
  return best;
}

}  // namespace shoal::network
