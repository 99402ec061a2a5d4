#include "client/member/liveness.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>

#include "base/clock.h"

namespace shoal::client {
namespace {

Seen seenBy(network::ConnectionLost::Cause cause) {
  using Cause = network::ConnectionLost::Cause;
  if (cause == Cause::kClosed) return Seen::kClosed;
  return cause == Cause::kSilent ? Seen::kSilent : Seen::kBroken;
}

}  // namespace

Liveness::Liveness(uint32_t session, uint32_t member, std::string name, int socket,
                   std::shared_ptr<network::ClientLink> link)
    : session_(session),
      member_(member),
      name_(std::move(name)),
      socket_(socket),
      link_(std::move(link)) {}

Liveness::~Liveness() {
  delete lost_.load();
  delete reported_reason_.load();
  if (socket_ >= 0) ::close(socket_);
}

void Liveness::close() noexcept {
  closed_ = true;
  if (socket_ >= 0) shutdown(socket_, SHUT_RDWR);
  if (link_ != nullptr) link_->stop();
}

void Liveness::abandon() noexcept {
  markLost(
      "this process was forked from the one that leases it, and cannot use it too; start it with "
      "the 'spawn' method instead",
      Seen::kBroken);
  closed_ = true;
  if (socket_ >= 0) ::close(socket_);
  socket_ = -1;
  if (link_ != nullptr) link_->abandon();
}

void Liveness::raiseUnusable() const {
  if (const Loss* loss = lost_.load(std::memory_order_acquire)) {
    const std::string* reported = reported_reason_.load(std::memory_order_acquire);
    const std::string& reason = reported != nullptr ? *reported : loss->reason;
    if (closed_) {
      raiseDeviceLost("shoal device " + name_ + " was lost: " + reason, name_);
    }
    const LostDevice lost{session_, member_, loss->seen, name_, reason};
    if (reported != nullptr) raiseDeviceLost(lost.text(reason), name_);
    raiseDeviceLost(lost);
  }
  raiseDeviceLost("the lease of shoal device " + name_ + " has ended", name_);
}

void Liveness::markLost(const std::string& reason, Seen seen) {
  const Loss* none = nullptr;
  auto loss = std::make_unique<const Loss>(Loss{reason, seen});
  if (lost_.compare_exchange_strong(none, loss.get())) loss.release();
}

void Liveness::reportLost(const std::string& reason) {
  const std::string* none = nullptr;
  auto reported = std::make_unique<const std::string>(reason);
  if (reported_reason_.compare_exchange_strong(none, reported.get())) reported.release();
  markLost(reason, Seen::kClosed);  // its worker may answer for another moment
}

void Liveness::raiseLost(const std::string& reason, Seen seen) {
  markLost(reason, seen);
  checkUsable();
  __builtin_unreachable();
}

void Liveness::checkAlive() {
  if (closed_) raiseLost("it was closed");
  if (link_ != nullptr) {
    const std::string reason = link_->failure();
    if (!reason.empty()) raiseLost(reason, seenBy(link_->failureCause()));
  }
  pollfd peer{socket_, POLLRDHUP, 0};
  if (poll(&peer, 1, 0) > 0 && (peer.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0) {
    raiseLost("its worker process ended", Seen::kClosed);
  }
  // Silence counts only during a wait: after a suspended machine, or a program that did not wait,
  // it starts anew.
  const int64_t now = nowNs();
  const bool watching = now - checked_ns_.exchange(now) < 1000000000;
  const uint64_t beat = progress_->heartbeat.load(std::memory_order_relaxed);
  if (heartbeat_seen_.exchange(beat) != beat || !watching) silent_since_ns_ = now;
  if (now - silent_since_ns_ > int64_t{transport::kHeartbeatLostMs} * 1000000) {
    raiseLost("its worker process gave no sign of life for " +
                  std::to_string(transport::kHeartbeatLostMs / 1000) + " s",
              Seen::kHung);
  }
}

}  // namespace shoal::client
