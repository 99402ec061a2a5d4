#include "worker/execute/server_orders.h"

#include "base/futex.h"
#include "base/log.h"

namespace shoal::worker {

using transport::SessionOrder;
using transport::SessionState;
using transport::SuspendRefusal;

namespace {

constexpr int64_t kSuspendedLookMs = 200;

SessionOrder orderOf(const transport::SessionBlock& block) {
  return static_cast<SessionOrder>(block.order.load(std::memory_order_acquire));
}

void publish(transport::SessionBlock& block, SessionState state, SuspendRefusal reason) {
  block.reason.store(static_cast<uint32_t>(reason), std::memory_order_relaxed);
  block.state.store(static_cast<uint32_t>(state), std::memory_order_release);
}

}  // namespace

void ServerOrders::obey() {
  seen_limit_bytes_ = grant_->limitBytes();
  if (arena_ != nullptr && arena_->excessBytes() > 0) shrink();
  transport::SessionBlock& block = grant_->block();
  if (orderOf(block) == seen_order_) return;
  if (orderOf(block) == SessionOrder::kRun) {  // after a refusal
    seen_order_ = SessionOrder::kRun;
    publish(block, SessionState::kRunning, SuspendRefusal::kNone);
    return grant_->ring();
  }
  seen_order_ = SessionOrder::kSuspend;
  publish(block, SessionState::kSuspending, SuspendRefusal::kNone);
  const SuspendRefusal refusal = suspend();
  if (refusal != SuspendRefusal::kNone) {
    publish(block, SessionState::kRefused, refusal);
    return grant_->ring();
  }
  publish(block, SessionState::kSuspended, SuspendRefusal::kNone);
  grant_->ring();
  // The watch thread ends the process if the client goes.
  while (orderOf(block) == SessionOrder::kSuspend) {
    transport::futexWait(&block.order, static_cast<uint32_t>(SessionOrder::kSuspend),
                         kSuspendedLookMs);
  }
  resume();
}

void ServerOrders::shrink() {
  try {
    segments_.shrink(arena_->excessBytes());
  } catch (const c10::Error& error) {
    // What is used now stays. The allocation that needs the room will report it.
    transport::logWarning(std::string("the session does not shrink: ") +
                          error.what_without_backtrace());
  }
  arena_->trim();
  grant_->ring();
}

// A CPU device's memory is host memory: it changes its owner in the ledgers, and no byte moves.
SuspendRefusal ServerOrders::suspend() {
  if (arena_ == nullptr) return SuspendRefusal::kAccelerator;
  if (peers_ != nullptr && peers_->count() > 0) return SuspendRefusal::kPeers;
  if (segments_.sharedCount() > 0) return SuspendRefusal::kShares;
  arena_->trim();
  arena_->setAside(true);
  return SuspendRefusal::kNone;
}

void ServerOrders::resume() {
  transport::SessionBlock& block = grant_->block();
  seen_order_ = SessionOrder::kRun;
  publish(block, SessionState::kResuming, SuspendRefusal::kNone);
  arena_->setAside(false);
  seen_limit_bytes_ = grant_->limitBytes();
  if (arena_->excessBytes() > 0) shrink();
  publish(block, SessionState::kRunning, SuspendRefusal::kNone);
  grant_->ring();
}

}  // namespace shoal::worker
