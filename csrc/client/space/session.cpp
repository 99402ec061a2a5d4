#include "client/space/session.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "base/byte_units.h"
#include "client/directory/room_search.h"
#include "client/member/errors.h"
#include "client/space/devices.h"
#include "client/space/sharded_segments.h"

namespace shoal::client {

using wire::Address;

namespace {

constexpr uint64_t kPromptFreeBytes = uint64_t{1} << 20;  // a larger free is sent at once

std::span<const SegmentUse> span(c10::ArrayRef<SegmentUse> uses) {
  return {uses.data(), uses.size()};
}

}  // namespace

Member& Session::add(MemberOptions options) {
  TORCH_CHECK(size() < kMembersMax, "a lease has at most ", kMembersMax, " devices");
  directory_.addMember(options.memory_bytes, options.spill_bytes);
  const auto number = static_cast<uint32_t>(size());
  members_.push_back(std::make_unique<Member>(std::move(options), *this, number));
  return *members_.back();
}

Session::~Session() {
  host_releases_.leave();
}

// --- addresses

void Session::raiseOutOfMemory(uint64_t bytes, c10::DeviceIndex index) const {
  using memory::readable;
  const Shortage shortage = directory_.memory().shortage(index - 1);
  // Libraries that retry with a smaller batch look for " out of memory." with its full stop.
  TORCH_CHECK_WITH(OutOfMemoryError, false, "shoal:", static_cast<int>(index), " (",
                   shortage.whole_lease && !single()
                       ? "all " + std::to_string(size()) + " devices of the lease"
                       : members_[shortage.member]->options().name,
                   ") is out of memory. Tried to allocate ", readable(bytes), "; ",
                   readable(shortage.used_bytes), " of ", readable(shortage.limit_bytes),
                   " are in use (", readable(shortage.memory_bytes), " of device memory and ",
                   readable(shortage.limit_bytes - shortage.memory_bytes),
                   " of swap space). Free tensors, use a smaller batch, or lease ",
                   "more with shoal.connect(devices=N) or shoal.connect(memory=\"8GiB\").");
  __builtin_unreachable();
}

Address Session::mint(uint64_t bytes, c10::DeviceIndex index, const Lock& held) {
  deviceMember(index).checkUsable();
  checkRoom(bytes, index, held);
  const Address address = directory_.mint(bytes, index - 1);
  TORCH_CHECK(address != 0, "shoal: more than ", wire::kSlotsMax,
              " tensors are alive in one lease");
  if (Observer* observer = Observer::current()) observer->minted(address, bytes, index);
  return address;
}

void Session::release(Address address) noexcept {
  bool last = false;
  {
    const Lock held = lock();
    release(address, held);
    last = directory_.memory().liveSegments() == 0 && !usable();
  }
  if (last) Devices::get().sweep();
}

void Session::release(Address address, const Lock& held) noexcept {
  if (directory_.extents().of(address) == nullptr) return releaseCopies(address, held);
  for (const Extent& extent : splitSharded(*this, address, held)) releaseCopies(extent.base, held);
}

void Session::releaseCopies(Address base, const Lock& held) noexcept {
  if (observer_ != nullptr) observer_->released(base);
  const Segment& segment = directory_.at(base);
  if (segment.copied_later || segment.awaitsCopy()) {
    noteMembers();
    while (const Step step = directory_.copies().releaseStep(base)) {
      try {
        directory_.apply(step, carryOut(step, held));
      } catch (...) {
        // One of the two devices is gone.
        directory_.copies().lose(step.target, members_[step.from]->usable());
      }
    }
  }
  if (trace_.active() && segment.home >= 0) {
    trace_.beginCall();
    trace_.note(Access::kFree, base, static_cast<uint32_t>(segment.home), directory_);
  }
  while (const Step step = directory_.dropStep(base, 0)) {
    try {
      drop(step, held);
    } catch (...) {
      // The worker is gone, and its memory with it. The next call says so.
    }
  }
  directory_.released(base);
  checkInvariants();
}

// --- steps

// Tells the directory which members are left, and how far their streams are.
void Session::noteMembers() {
  for (const auto& member : members_) {
    directory_.noteMember(member->number(), member->usable(), member->lastSequence());
  }
}

// Posts what a step needs. Returns the number of the message of `step.to`.
uint64_t Session::carryOut(const Step& step, const Lock& held) {
  Member& to = *members_[step.to];
  switch (step.kind) {
    case Step::Kind::kAllocate:
      return to.post(wire::Allocate{step.target, directory_.at(step.target).bytes}, held);
    case Step::Kind::kFetch: {
      std::optional<Observer::Aside> aside;  // another device makes its own lazy copies
      if (step.target != step.source) aside.emplace();
      const uint64_t bytes = directory_.at(step.source).bytes;
      // The source may have come to the target's device meanwhile.
      if (step.from == step.to) {
        return to.post(wire::CopyWithin{step.target, step.source, bytes}, held);
      }
      return postFetch(to, step.target, *members_[step.from], step.source, 0, bytes, held);
    }
    case Step::Kind::kRaise:
      raise(step);
    case Step::Kind::kFree:
    case Step::Kind::kNone:
      break;
  }
  return to.lastSequence();
}

void Session::raise(const Step& step) const {
  TORCH_CHECK(step.reason != Step::Reason::kSharded,
              "shoal: an operator needs a tensor whole that is larger than any device");
  if (step.reason == Step::Reason::kShared) {
    raiseShareError("a shared tensor is used on shoal:" + std::to_string(step.to + 1) +
                    " only. Make a copy for the other device: tensor.clone().to(device)");
  }
  members_[step.to]->checkUsable();
  TORCH_CHECK(false, "shoal: no device of the lease is left");
}

void Session::bringByStep(Address base, Member& member, const Lock& held) {
  noteMembers();
  while (const Step step = directory_.bringStep(base, member.number())) {
    directory_.apply(step, carryOut(step, held));
  }
  checkInvariants();
}

void Session::flush(Address base, const Lock& held) {
  noteMembers();
  while (const Step step = directory_.copies().flushStep(base)) {
    directory_.apply(step, carryOut(step, held));
  }
}

void Session::overwrite(Address base, const Lock& held) {
  if (directory_.copiedLater(base)) flush(base, held);
  if (directory_.at(base).awaitsCopy()) directory_.copies().cancel(base);
}

void Session::drop(const Step& step, const Lock& held) {
  Member& member = *members_[step.to];
  const bool now = directory_.at(step.target).bytes >= kPromptFreeBytes || step.host_block != 0;
  directory_.apply(step, 0);
  if (member.usable()) member.requests(held).free(step.target, now, held);
  // Only when every member is past the free, or past a read of the block, is it ours again.
  if (step.host_block != 0) host_releases_.add(step.host_block - 1);
}

void Session::invalidate(Address base, Member& member, uint64_t sequence, const Lock& held) {
  while (const Step step = directory_.dropStep(base, member.bit())) drop(step, held);
  directory_.wrote(base, member.number(), sequence);
  checkInvariants();
}

// A check of all segments at every step is for builds that look for bugs.
void Session::checkInvariants() const {
#ifdef SHOAL_SANITIZED
  const std::string wrong = directory_.violation();
  TORCH_INTERNAL_ASSERT(wrong.empty(), "shoal: ", wrong);
#endif
}

// --- before a message

Member* Session::home(Address base, const Lock&) {
  if (!single()) noteMembers();
  const int home = directory_.home(base);
  return home < 0 ? nullptr : members_[static_cast<size_t>(home)].get();
}

Member& Session::homeOrPlace(Address base, const Lock& held) {
  Member* home = this->home(base, held);
  if (home == nullptr) {
    const SegmentUse use{base, true};
    home = &place(use, deviceOf(base, held), 0, held);
    makeRoom(*home, use, 0, held);
  }
  home->checkUsable();
  return *home;
}

Member& Session::place(c10::ArrayRef<SegmentUse> uses, c10::DeviceIndex index, uint64_t made_bytes,
                       const Lock&) {
  if (single() || index > 0) return deviceMember(index);
  noteMembers();
  const int member = directory_.place(span(uses), made_bytes);
  if (member < 0) raise({Step::Kind::kRaise, Step::Reason::kLost, 0});
  return *members_[static_cast<size_t>(member)];
}

void Session::moveForRoom(Member& member, c10::ArrayRef<SegmentUse> uses, uint64_t made_bytes,
                          const Lock& held) {
  RoomSearch search(directory_, member.number(), span(uses), made_bytes);
  while (search.needed()) {
    noteMembers();
    const Step step = search.next();
    if (step.kind == Step::Kind::kFree) {
      drop(step, held);
    } else {
      directory_.apply(step, carryOut(step, held));
    }
  }
}

uint64_t Session::postFetch(Member& to, Address target, Member& from, Address from_base,
                            uint64_t from_offset, uint64_t bytes, const Lock& held) {
  // The two messages name each other: each side knows how far the other must be.
  const uint64_t reading = to.requests(held).nextSequence(held);
  const uint64_t exported = from.post(wire::Export{from_base, to.number(), reading}, held);
  to.traffic(held).bytes_peer += bytes;
  return to.post(wire::Fetch{.to = target,
                             .from = from_base + from_offset,
                             .bytes = bytes,
                             .peer = from.number(),
                             .written = directory_.at(from_base).written_at,
                             .exported = exported},
                 held);
}

bool Session::copyLater(Address to_base, Address from_base) {
  CallLines::note();
  const Lock held = lock();
  if (!directory_.copies().possible(to_base, from_base)) return false;
  const auto of = [this](Address base) -> Member& {
    return *members_[static_cast<size_t>(directory_.at(base).pinned)];
  };
  of(to_base).checkUsable();
  of(from_base).checkUsable();
  bring(from_base, of(from_base), held);
  overwrite(to_base, held);
  directory_.copies().add(to_base, from_base);
  checkInvariants();
  return true;
}

}  // namespace shoal::client
