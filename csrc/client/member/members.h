// The members of one lease, and the lock under which messages are posted to them.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "client/member/member.h"

namespace shoal::client {

class Members {
 public:
  explicit Members(uint32_t session) : session_(session) {}
  Members(const Members&) = delete;

  // The session's number.
  uint32_t number() const { return session_; }
  size_t size() const { return members_.size(); }
  bool single() const { return members_.size() == 1; }
  Member& member(size_t i) const { return *members_[i]; }
  // The member of device `index`. Device 0 is the whole lease, where the first one speaks for all.
  Member& deviceMember(c10::DeviceIndex index) const {
    return *members_[index > 0 ? static_cast<size_t>(index) - 1 : 0];
  }
  Lock lock() { return Lock(mutex_); }

  // Waits (without the lock) until the device's members have taken most of what was sent.
  void awaitRoom(c10::DeviceIndex index) {
    if (index > 0) return deviceMember(index).awaitRoom();
    for (auto& member : members_) member->awaitRoom();
  }
  void synchronize(c10::DeviceIndex index);
  bool idle(c10::DeviceIndex index);
  // Workers give memory back that they keep for later.
  void trim();
  void close() noexcept;
  void abandon() noexcept;
  bool usable() const;
  // Raises what went wrong on members other than this one, if anything did.
  void raiseFailureOfOthers(const Member& than);

 protected:
  ~Members() = default;
  std::vector<std::unique_ptr<Member>> members_;

 private:
  uint32_t session_;
  std::mutex mutex_;
};

}  // namespace shoal::client
