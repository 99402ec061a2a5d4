#include "client/member/members.h"

#include <algorithm>
#include <exception>

#include "client/member/interrupts.h"

namespace shoal::client {

void Members::synchronize(c10::DeviceIndex index) {
  if (index > 0 || single()) return deviceMember(index).synchronize();
  CallLines::note();
  std::vector<uint64_t> sequences;
  {
    const Lock held = lock();
    for (auto& member : members_) sequences.push_back(member->post(wire::Sync{}, held));
  }
  std::exception_ptr first;
  for (size_t i = 0; i < size(); ++i) {
    try {
      members_[i]->await(sequences[i]);
    } catch (const Interrupted&) {
      throw;
    } catch (...) {
      if (first == nullptr) first = std::current_exception();
    }
  }
  if (first != nullptr) std::rethrow_exception(first);
}

bool Members::idle(c10::DeviceIndex index) {
  const auto idle = [](Member& member) { return member.askDone(member.lastSequence()); };
  if (index > 0 || single()) return idle(deviceMember(index));
  return std::all_of(members_.begin(), members_.end(), [&](const auto& m) { return idle(*m); });
}

void Members::raiseFailureOfOthers(const Member& than) {
  for (auto& member : members_) {
    if (member.get() != &than) member->synchronize();
  }
}

void Members::close() noexcept {
  for (auto& member : members_) member->liveness().close();
}

void Members::abandon() noexcept {
  for (auto& member : members_) member->liveness().abandon();
}

void Members::trim() {
  for (auto& member : members_) member->post(wire::Trim{});
}

bool Members::usable() const {
  return std::any_of(members_.begin(), members_.end(), [](const auto& m) { return m->usable(); });
}

}  // namespace shoal::client
