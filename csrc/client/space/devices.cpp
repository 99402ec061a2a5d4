#include "client/space/devices.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "client/member/errors.h"
#include "client/space/host_memory.h"

namespace shoal::client {

thread_local c10::DeviceIndex Devices::current_ = 0;

Devices& Devices::get() {
  static auto* devices = new Devices;  // never destroyed: deleters run until the very end
  return *devices;
}

Session& Devices::session() {
  if (!attached() && start_pool) start_pool();
  Session* session = present_.load(std::memory_order_acquire);
  TORCH_CHECK(session != nullptr, "shoal: the lease has ended. Call shoal.connect() again.");
  return *session;
}

Session& Devices::sessionWith(c10::DeviceIndex index) {
  Session& session = this->session();
  TORCH_CHECK(index <= static_cast<c10::DeviceIndex>(session.size()),
              "shoal:", static_cast<int>(index), " does not exist: the lease has ", session.size(),
              " device(s). Ask for more with shoal.connect(devices=N).");
  return session;
}

Session& Devices::owner(wire::Address address) const {
  Session* session = byNumber(wire::sessionOf(address) % wire::kSessionsMax);
  if (session == nullptr) {
    raiseDeviceLost(
        "this tensor belongs to a shoal session that has ended; its memory is gone. "
        "Create it again on the present lease.",
        /*device=*/"");
  }
  return *session;
}

c10::DeviceIndex Devices::count() const {
  const Session* session = present_.load(std::memory_order_acquire);
  if (session == nullptr) return 0;
  return static_cast<c10::DeviceIndex>(session->single() ? 1 : session->size() + 1);
}

void Devices::attach(std::unique_ptr<Session> session) {
  current_ = 0;  // a number that the last lease had may be none of this one
  {
    std::lock_guard lock(mutex_);
    take(std::move(session));
  }
  want();
}

void Devices::take(std::unique_ptr<Session> session) {
  const uint32_t number = session->number();
  TORCH_CHECK(number > 0 && number < wire::kSessionsMax, "bad session number");
  TORCH_CHECK(sessions_[number].load() == nullptr, "session number in use");
  TORCH_CHECK(session->size() > 0, "a lease has at least one device");
  Session* raw = session.release();
  sessions_[number].store(raw, std::memory_order_release);
  present_.store(raw, std::memory_order_release);
  const auto names = static_cast<c10::DeviceIndex>(raw->size() + 1);
  names_ever_.store(std::max(namesEver(), names), std::memory_order_release);
}

void Devices::detach() {
  {
    std::lock_guard lock(mutex_);
    if (Session* session = present_.exchange(nullptr)) session->close();
  }
  sweep();
}

bool Devices::abandon() {
  // No lock: another thread of the parent may have held it when the child was made.
  Session* session = present_.exchange(nullptr);
  if (session != nullptr) session->abandon();
  names_ever_ = 0;  // a forked child has no device, so its autograd needs no thread for one
  if (HostMemory::exists()) HostMemory::get().abandon();
  return session != nullptr || HostMemory::exists();
}

void Devices::sweep() noexcept {
  std::lock_guard lock(mutex_);
  for (auto& entry : sessions_) {
    Session* session = entry.load();
    if (session == nullptr || session == present_.load() || session->usable() ||
        session->directory(session->lock()).memory().liveSegments() > 0) {
      continue;
    }
    entry.store(nullptr);
    delete session;
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
