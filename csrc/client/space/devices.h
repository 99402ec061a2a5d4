// Which sessions this program has: the present lease, and the owner of any address. A session
// outlives its lease while tensors of it are alive.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "client/space/session.h"

namespace shoal::client {

class Devices {
 public:
  static Devices& get();

  // The present lease. Starts or joins a pool if there is none yet.
  Session& session();
  // The present lease, which must have device `index`.
  Session& sessionWith(c10::DeviceIndex index);
  // The session of a number; null if it is over and forgotten.
  Session* byNumber(uint32_t number) const {
    return sessions_[number].load(std::memory_order_acquire);
  }
  Session& owner(wire::Address address) const;

  void attach(std::unique_ptr<Session> session);
  void detach();
  // In a forked child: closes the streams' sockets without a word to the workers, which are the
  // parent's. True if there was anything that the two cannot share.
  bool abandon();
  // Closed sessions are kept until the last of their segments is freed.
  void sweep() noexcept;
  std::vector<uint32_t> sessionsInUse() const;

  // Devices of the present lease: one, or the whole and each member.
  c10::DeviceIndex count() const;
  // How many indices a tensor of any lease so far may have: the whole and each member, which has a
  // name of its own also where it is the only one. Torch's autograd indexes arrays by them.
  c10::DeviceIndex namesEver() const { return names_ever_.load(std::memory_order_acquire); }
  // Whether torch may count on the device: the user asked for a pool, or the program has named the
  // device. Until then the program is a guest: torch must behave as if Shoal were not installed.
  bool wanted() const { return wanted_.load(std::memory_order_relaxed); }
  void want() { wanted_.store(true, std::memory_order_relaxed); }
  bool attached() const { return present_.load(std::memory_order_relaxed) != nullptr; }
  static c10::DeviceIndex current() { return current_; }
  static void setCurrent(c10::DeviceIndex index) { current_ = index; }

  // Called (without any lock) when a device is needed and there is none. Set by the bindings.
  std::function<void()> start_pool;

 private:
  void take(std::unique_ptr<Session> session);

  mutable std::mutex mutex_;
  std::array<std::atomic<Session*>, wire::kSessionsMax> sessions_{};
  std::atomic<Session*> present_{nullptr};
  std::atomic<c10::DeviceIndex> names_ever_{0};
  std::atomic<bool> wanted_{false};
  static thread_local c10::DeviceIndex current_;
};

}  // namespace shoal::client
