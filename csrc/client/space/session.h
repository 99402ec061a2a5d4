// One lease of this program: its members and the one address space that they share. The session
// holds the lock, asks the directory what has to happen, and posts the messages.
//
// All messages of a session are posted under one lock. A wait of one member for another always
// points at a message that was posted before, so members never wait in a circle.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "client/directory/access_trace.h"
#include "client/directory/directory.h"
#include "client/member/members.h"
#include "client/space/generator_homes.h"
#include "client/space/host_releases.h"
#include "wire/address.h"

namespace shoal::client {

// Device 0 is the whole lease; member m is device m + 1.
inline constexpr c10::DeviceIndex kDevicesMax = kMembersMax + 1;

class Session : public Members {
 public:
  explicit Session(uint32_t number)
      : Members(number), directory_(number), host_releases_(members_) {}
  ~Session();

  // Members are added before the session is attached.
  Member& add(MemberOptions options);
  Directory& directory(const Lock&) { return directory_; }
  AccessTrace& trace(const Lock&) { return trace_; }
  HostReleases& hostReleases(const Lock&) { return host_releases_; }
  GeneratorHomes& generatorHomes(const Lock&) { return generator_homes_; }

  // --- addresses
  // A new address for a segment of `bytes` > 0 of device `index`. No member has memory for it yet,
  // so this costs no message. Raises torch.OutOfMemoryError if the lease has no room.
  wire::Address mint(uint64_t bytes, c10::DeviceIndex index, const Lock&);
  wire::Address mint(uint64_t bytes, c10::DeviceIndex index) { return mint(bytes, index, lock()); }
  void release(wire::Address address) noexcept;
  void release(wire::Address address, const Lock&) noexcept;
  void checkRoom(uint64_t bytes, c10::DeviceIndex index, const Lock&) const {
    if (!directory_.memory().fits(bytes, index - 1)) raiseOutOfMemory(bytes, index);
  }
  c10::DeviceIndex deviceOf(wire::Address base, const Lock&) const {
    return static_cast<c10::DeviceIndex>(directory_.at(base).pinned + 1);
  }
  // Set once, before the lease is used.
  uint64_t wholeBytesMax() const { return directory_.memory().wholeBytesMax(); }
  uint64_t largestMemory() const { return directory_.memory().largestMemoryBytes(); }

  // --- before a message
  // The member that runs a call on device `index`: where most of the bytes are that it uses.
  // `made_bytes` is what it makes besides.
  Member& place(c10::ArrayRef<SegmentUse> uses, c10::DeviceIndex index, uint64_t made_bytes,
                const Lock&);
  // Makes sure that a call's segments fit on a member.
  void makeRoom(Member& member, c10::ArrayRef<SegmentUse> uses, uint64_t made_bytes,
                const Lock& held) {
    if (!single()) moveForRoom(member, uses, made_bytes, held);
  }
  // The segment's present bytes are on `member` for its next message.
  void bring(wire::Address base, Member& member, const Lock& held) {
    if (!directory_.present(base, member.number())) bringByStep(base, member, held);
  }
  // The same for a message that changes the segment.
  void bringToWrite(wire::Address base, Member& member, const Lock& held) {
    if (directory_.copiedLater(base)) flush(base, held);
    bring(base, member, held);
  }
  // A message is about to replace the whole segment, whatever it holds.
  void overwrite(wire::Address base, const Lock&);
  // The member with the segment's present bytes; null if no member has memory for it.
  Member* home(wire::Address base, const Lock&);
  // The same, but memory is found for it.
  Member& homeOrPlace(wire::Address base, const Lock&);

  // --- after a message
  // Message `sequence` of `member` changed the segment: other copies are void.
  void wrote(wire::Address base, Member& member, uint64_t sequence, const Lock& held) {
    if (!single()) invalidate(base, member, sequence, held);
  }
  // Message `sequence` of `member` makes the segment.
  void made(wire::Address base, Member& member, uint64_t sequence, const Lock&) {
    directory_.made(base, member.number(), sequence);
  }
  // Drops all copies but that of `member`, which message `sequence` changed.
  void invalidate(wire::Address base, Member& member, uint64_t sequence, const Lock&);

  // A call was posted on `member`, for those who trace accesses.
  void traceCall(c10::ArrayRef<SegmentUse> uses, c10::ArrayRef<wire::Address> made,
                 const Member& member, const Lock&) {
    if (!trace_.active()) return;
    trace_.noteCall({uses.data(), uses.size()}, {made.data(), made.size()}, member.number(),
                    directory_);
  }

  // Copies a range of the segment `from_base` on `from` to the address `target` on `to`. Returns
  // the number of the message that reads it.
  uint64_t postFetch(Member& to, wire::Address target, Member& from, wire::Address from_base,
                     uint64_t from_offset, uint64_t bytes, const Lock&);
  // Copies the whole segment from another device when it is used first, or sooner, before the
  // source changes. False if the copy cannot be deferred.
  bool copyLater(wire::Address to_base, wire::Address from_base);

  // Who is told of releases, by whatever thread; null: nobody. False if there is one already.
  bool observe(Observer* observer, const Lock&) {
    if (observer != nullptr && observer_ != nullptr) return false;
    observer_ = observer;
    return true;
  }

 private:
  void noteMembers();
  uint64_t carryOut(const Step& step, const Lock&);
  [[noreturn]] void raise(const Step& step) const;
  [[noreturn]] void raiseOutOfMemory(uint64_t bytes, c10::DeviceIndex index) const;
  void moveForRoom(Member& member, c10::ArrayRef<SegmentUse> uses, uint64_t made_bytes,
                   const Lock&);
  void bringByStep(wire::Address base, Member& member, const Lock&);
  void flush(wire::Address base, const Lock&);
  void drop(const Step& step, const Lock&);
  void releaseCopies(wire::Address base, const Lock&) noexcept;
  void checkInvariants() const;

  Observer* observer_ = nullptr;
  Directory directory_;
  AccessTrace trace_;
  HostReleases host_releases_;
  GeneratorHomes generator_homes_;
};

}  // namespace shoal::client
