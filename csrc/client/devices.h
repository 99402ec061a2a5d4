// Which streams this program has: by device index (the present lease) and by session (the owner of
// an address). A stream outlives its lease while tensors of it are alive.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "client/stream.h"

namespace shoal::client {

// Member devices of a lease that one program can hold; autograd keeps a thread for each.
inline constexpr c10::DeviceIndex kDevicesMax = 33;

class Devices {
 public:
  static Devices& get();

  // The stream of a device of the present lease. Starts or joins a pool if there is none yet.
  Stream& stream(c10::DeviceIndex index);
  // The stream that an address belongs to; null if its session is over and forgotten.
  Stream* bySession(uint32_t session) const {
    return sessions_[session].load(std::memory_order_acquire);
  }
  Stream& owner(wire::Address address) const;

  void attach(std::unique_ptr<Stream> stream);
  void detachAll();
  // In a forked child: closes the streams' sockets without a word to the workers, which are the
  // parent's. True if there was anything that the two cannot share.
  bool abandonAll();
  // Closed streams are kept until the last of their segments is freed.
  void sweep() noexcept;
  std::vector<uint32_t> sessionsInUse() const;

  c10::DeviceIndex count() const { return count_.load(std::memory_order_relaxed); }
  bool attached() const { return count() > 0; }
  static c10::DeviceIndex current() { return current_; }
  static void setCurrent(c10::DeviceIndex index) { current_ = index; }

  // Called (without any lock) when a device is needed and there is none. Set by the bindings.
  std::function<void()> start_pool;

 private:
  mutable std::mutex mutex_;
  std::array<std::atomic<Stream*>, wire::kSessionsMax> sessions_{};
  std::array<std::atomic<Stream*>, kDevicesMax> by_index_{};
  std::atomic<c10::DeviceIndex> count_{0};
  static thread_local c10::DeviceIndex current_;
};

}  // namespace shoal::client
