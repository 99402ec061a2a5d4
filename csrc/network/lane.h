// Connections that carry pieces of transfers beside a session's op stream, in one direction, so
// that encryption runs on several cores. The stream says which piece goes by which lane; a lane
// carries its pieces in that order, and nothing else.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "network/tls.h"

namespace shoal::network {

class Lane {
 public:
  struct Piece {
    std::byte* data;
    uint64_t bytes;
    std::function<void()> done;  // it has left (the memory may change), or is there
  };
  enum class Direction { kSend, kReceive };

  Lane(std::unique_ptr<Connection> connection, Direction direction)
      : connection_(std::move(connection)), direction_(direction) {
    connection_->setSpin(0);  // it is all about bytes a second: a core that spins encrypts nothing
  }

  // Few pieces wait for a lane that sends; one that receives has as many as the stream announced.
  bool tryPush(Piece& piece);
  // Waits for room. Throws ConnectionLost if the lane is stopped.
  void push(Piece piece);
  size_t queued() const;

  // The lane's thread: carries pieces until stop(). Throws ConnectionLost.
  void run();
  void stop() noexcept;
  Connection& connection() { return *connection_; }

 private:
  bool full() const;
  void carry(const Piece& piece, bool more);

  std::unique_ptr<Connection> connection_;
  const Direction direction_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Piece> pieces_;  // the first is being carried
  bool stopped_ = false;
};

using Lanes = std::vector<std::unique_ptr<Lane>>;

// The number, from 1, of the lane with the least to do; 0 if a piece of `bytes` is better sent with
// the stream.
uint32_t chooseLane(const Lanes& lanes, uint64_t bytes);

}  // namespace shoal::network
