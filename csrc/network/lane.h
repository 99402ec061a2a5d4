// Connections that carry chunks of transfers beside a session's op stream, in one direction, so
// that encryption runs on several cores. The stream says which lane carries which chunk. A lane
// carries its chunks in that order, and nothing else.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "network/tls/tls.h"

namespace shoal::network {

class Lane {
 public:
  struct Chunk {
    std::byte* data;
    uint64_t bytes;
    std::function<void()> done;  // it has left, so its memory may change, or has arrived
  };
  enum class Direction { kSend, kReceive };

  Lane(std::unique_ptr<Connection> connection, Direction direction)
      : connection_(std::move(connection)), direction_(direction) {
    connection_->setSpin(0);  // a core that spins encrypts nothing
  }

  // Few chunks wait for a lane that sends. A lane that receives has as many as the stream
  // announced.
  bool tryPush(Chunk& chunk);
  // Waits for room. Throws ConnectionLost if the lane is stopped.
  void push(Chunk chunk);
  size_t queued() const;

  // Carries chunks until stop(), in the lane's thread. Throws ConnectionLost.
  void run();
  void stop() noexcept;
  Connection& connection() { return *connection_; }

 private:
  bool full() const;
  void carry(const Chunk& chunk, bool more);

  std::unique_ptr<Connection> connection_;
  const Direction direction_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Chunk> chunks_;  // the first is being carried
  bool stopped_ = false;
};

using Lanes = std::vector<std::unique_ptr<Lane>>;

// The number, from 1, of the lane with the least to do; 0 if the stream should carry the `bytes`.
uint32_t chooseLane(const Lanes& lanes, uint64_t bytes);

}  // namespace shoal::network
