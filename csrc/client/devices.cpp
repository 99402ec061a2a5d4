#include "client/devices.h"

#include <c10/util/Exception.h>

#include "client/errors.h"
#include "client/host_memory.h"

namespace shoal::client {

thread_local c10::DeviceIndex Devices::current_ = 0;

Devices& Devices::get() {
  static auto* devices = new Devices;  // never destroyed: deleters run until the very end
  return *devices;
}

Stream& Devices::stream(c10::DeviceIndex index) {
  if (index < 0) index = current_;
  if (count() == 0 && start_pool) start_pool();
  TORCH_CHECK(index < count(), "shoal:", static_cast<int>(index), " does not exist: the lease has ",
              static_cast<int>(count()), " device(s). Ask for more with shoal.connect(devices=N).");
  Stream* stream = by_index_[static_cast<size_t>(index)].load(std::memory_order_acquire);
  TORCH_CHECK(stream != nullptr, "shoal: the lease has ended. Call shoal.connect() again.");
  return *stream;
}

Stream& Devices::owner(wire::Address address) const {
  Stream* stream = bySession(wire::sessionOf(address) % wire::kSessionsMax);
  if (stream == nullptr) {
    raiseDeviceLost(
        "this tensor belongs to a shoal session that has ended; its memory is gone. "
        "Create it again on the present lease.");
  }
  return *stream;
}

void Devices::attach(std::unique_ptr<Stream> stream) {
  std::lock_guard lock(mutex_);
  const auto& options = stream->options();
  TORCH_CHECK(options.session > 0 && options.session < wire::kSessionsMax, "bad session number");
  TORCH_CHECK(sessions_[options.session].load() == nullptr, "session number in use");
  TORCH_CHECK(options.index >= 0 && options.index < kDevicesMax, "too many devices in a lease");
  Stream* raw = stream.release();
  sessions_[options.session].store(raw, std::memory_order_release);
  by_index_[static_cast<size_t>(options.index)].store(raw, std::memory_order_release);
  if (options.index + 1 > count_) count_ = static_cast<c10::DeviceIndex>(options.index + 1);
}

void Devices::detachAll() {
  {
    std::lock_guard lock(mutex_);
    for (auto& entry : by_index_) {
      if (Stream* stream = entry.exchange(nullptr)) stream->close();
    }
    count_ = 0;
  }
  sweep();
}

bool Devices::abandonAll() {
  // No lock: another thread of the parent may have held it when the child was made.
  for (auto& entry : by_index_) {
    if (Stream* stream = entry.exchange(nullptr)) stream->abandon();
  }
  const bool leased = count_.exchange(0) > 0;
  if (HostMemory::exists()) HostMemory::get().abandon();
  return leased || HostMemory::exists();
}

void Devices::sweep() noexcept {
  std::lock_guard lock(mutex_);
  for (auto& entry : sessions_) {
    Stream* stream = entry.load();
    if (stream == nullptr || stream->usable() || stream->liveSegments() > 0) continue;
    bool present = false;
    for (auto& indexed : by_index_) present = present || indexed.load() == stream;
    if (present) continue;
    entry.store(nullptr);
    delete stream;
  }
}

std::vector<uint32_t> Devices::sessionsInUse() const {
  std::vector<uint32_t> used;
  for (uint32_t i = 0; i < wire::kSessionsMax; ++i) {
    if (sessions_[i].load() != nullptr) used.push_back(i);
  }
  return used;
}

}  // namespace shoal::client
