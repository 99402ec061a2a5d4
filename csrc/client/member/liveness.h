// Whether a member's worker is alive, and why it is not.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "base/clock.h"
#include "client/member/errors.h"
#include "network/client_link.h"
#include "transport/progress.h"

namespace shoal::client {

class Liveness {
 public:
  // `link` is null for a worker on this machine. The socket belongs to this object.
  Liveness(uint32_t session, uint32_t member, std::string name, int socket,
           std::shared_ptr<network::ClientLink> link);
  ~Liveness();
  Liveness(const Liveness&) = delete;

  void watch(transport::Progress* progress) { progress_ = progress; }
  int socket() const { return socket_; }

  bool usable() const { return lost_.load() == nullptr && !closed_.load(); }
  // Raises DeviceLostError if the worker is gone or the lease has ended.
  void checkUsable() const {
    if (!usable()) raiseUnusable();
  }
  // Looks whether the worker is alive. Runs at least every 50 ms of any wait.
  void checkAlive();
  // The same at most every 50 ms, for callers that read the worker's memory without a message.
  void checkSometimes() {
    checkUsable();
    if (nowNs() - checked_ns_.load(std::memory_order_relaxed) > kCheckNs) checkAlive();
  }
  [[noreturn]] void raiseLost(const std::string& reason, Seen seen = Seen::kBroken);
  // Takes the pool's reason for the loss, for every error from now on.
  void reportLost(const std::string& reason);
  // Workers of the lease on this machine stop waiting for this one, unless it shows signs of life.
  void giveUp() { transport::giveUp(*progress_); }
  void close() noexcept;
  void abandon() noexcept;  // in a forked child: closes the socket and sends nothing

 private:
  // Set once and then only read, by any thread, also in a forked child.
  struct Loss {
    std::string reason;
    Seen seen;
  };
  void markLost(const std::string& reason, Seen seen);
  [[noreturn]] void raiseUnusable() const;

  static constexpr int64_t kCheckNs = 50000000;
  const uint32_t session_, member_;
  const std::string name_;
  int socket_;
  const std::shared_ptr<network::ClientLink> link_;
  transport::Progress* progress_ = nullptr;
  std::atomic<const Loss*> lost_{nullptr};
  std::atomic<const std::string*> reported_reason_{nullptr};  // by the pool
  std::atomic<bool> closed_{false};
  std::atomic<uint64_t> heartbeat_seen_{0};
  std::atomic<int64_t> silent_since_ns_{0};  // when the heartbeat last changed during a wait
  std::atomic<int64_t> checked_ns_{0};
};

}  // namespace shoal::client
