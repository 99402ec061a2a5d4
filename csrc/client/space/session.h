// One lease of this program: its member devices, with an op stream each, and the one address space
// that they share.
//
// The client decides and its streams are its word, so it knows where every segment is and when it
// is written: keeping memory coherent between members costs no message but the copies themselves.
// All messages of a session are posted under one lock; a wait of one member for another always
// points at a message that was posted before, so members never wait in a circle.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "client/member/member.h"
#include "wire/address.h"

namespace shoal::client {

// Member devices that one lease can have; bits of a 32-bit mask.
inline constexpr uint32_t kMembersMax = 32;
// Device 0 is the whole lease; member m is device m + 1.
inline constexpr c10::DeviceIndex kDevicesMax = kMembersMax + 1;

struct MemoryUse {
  uint64_t allocated_bytes = 0;
  uint64_t peak_bytes = 0;
  uint64_t limit_bytes = 0;   // with what may be swapped out
  uint64_t memory_bytes = 0;  // of the devices alone
  uint64_t allocations = 0;
  uint64_t frees = 0;
};

// A segment that a call uses.
struct SegmentUse {
  wire::Address base;
  bool writes;
};

// What makes a shared memory (csrc/worker/shared/shared_block.h). The session passes it on to a
// worker.
struct SharedDescriptors {
  int memory = -1, control = -1, line = -1;
  uint64_t participant = 0;  // this session's number among those that share
};

// A piece of a segment that is larger than any device: an ordinary segment of its own.
struct Extent {
  wire::Address base;
  uint64_t start;  // in the wide segment
  uint64_t bytes;
};
using Extents = std::vector<Extent>;  // without gaps, in order

class Recording;

class Session {
 public:
  explicit Session(uint32_t number) : number_(number) { segments_.resize(1024); }
  Session(const Session&) = delete;
  ~Session();

  uint32_t number() const { return number_; }
  // Members are added before the session is attached.
  Stream& add(StreamOptions options);
  size_t size() const { return members_.size(); }
  bool single() const { return members_.size() == 1; }
  Stream& member(size_t i) const { return *members_[i]; }
  // The member of device `index`: 0 is the whole lease, where the first speaks for all.
  Stream& deviceMember(c10::DeviceIndex index) const {
    return *members_[index > 0 ? static_cast<size_t>(index) - 1 : 0];
  }
  Lock lock() { return Lock(mutex_); }

  // --- addresses
  // A new address for a segment of `bytes` > 0 of device `index`. No memory is behind it yet: that
  // costs no message. Raises torch.OutOfMemoryError if the lease has no room.
  wire::Address mint(uint64_t bytes, c10::DeviceIndex index, const Lock&);
  wire::Address mint(uint64_t bytes, c10::DeviceIndex index);
  void release(wire::Address address) noexcept;
  void release(wire::Address address, const Lock& held) noexcept { releaseLocked(address, held); }
  uint64_t liveSegments() const { return live_segments_.load(std::memory_order_relaxed); }
  void checkRoom(uint64_t bytes, c10::DeviceIndex index, const Lock&) const;
  c10::DeviceIndex deviceOf(wire::Address base, const Lock&) const {
    return static_cast<c10::DeviceIndex>(at(base).pinned + 1);
  }

  // --- wide segments (wide.cpp): larger than any device, so they are made of extents
  // A segment of more bytes is made wide; no call can have it as a whole and do much with it.
  uint64_t wholeBytesMax() const { return whole_bytes_max_; }
  uint64_t largestMemory() const { return largest_memory_; }
  // How large an extent may be: several of them fit a device together.
  uint64_t extentBytes() const { return largest_memory_ / 8; }
  // Mints a wide segment, cut so that `row_bytes` stay together where that can be.
  wire::Address mintWide(uint64_t bytes, uint64_t row_bytes, c10::DeviceIndex index);
  // Makes existing segments the extents of a wide one, which owns them from now on.
  wire::Address joinWide(const std::vector<wire::Address>& bases, c10::DeviceIndex index);
  // Takes a wide segment apart again: the extents belong to the caller.
  Extents splitWide(wire::Address base);
  // The extents of a wide segment, which live as long as it does; null for any other.
  const Extents* extents(wire::Address base, const Lock&) const;
  const Extents* extents(wire::Address base) { return extents(base, lock()); }

  // --- where things are
  // The member that runs a call on device `index`: where most of the bytes are that it uses.
  // `made_bytes` is what it makes beside.
  Stream& place(c10::ArrayRef<SegmentUse> uses, c10::DeviceIndex index, uint64_t made_bytes,
                const Lock&);
  // Makes sure that a call's segments fit on a member, by moving what was not used for long.
  void makeRoom(Stream& member, c10::ArrayRef<SegmentUse> uses, uint64_t made_bytes, const Lock&);
  // The segment's present bytes are on `member` for its next message.
  void bring(wire::Address base, Stream& member, const Lock& held) {
    Segment& segment = at(base);
    if ((segment.valid & member.bit()) == 0) bringFrom(base, segment, member, held);
  }
  // The same for a message that changes the segment.
  void bringToWrite(wire::Address base, Stream& member, const Lock& held) {
    if (at(base).owes) settle(base, held);
    bring(base, member, held);
  }
  // Message `sequence` of `member` changed the segment: other copies are void.
  void wrote(wire::Address base, Stream& member, uint64_t sequence, const Lock& held) {
    if (!single()) invalidate(base, member, sequence, held);
  }
  // Message `sequence` of `member` makes the segment.
  void made(wire::Address base, Stream& member, uint64_t sequence, const Lock&);
  // The member with the segment's present bytes; null if nothing is behind it yet.
  Stream* home(wire::Address base, const Lock&);
  // The generator's state is on `member` for its next message.
  void bringGenerator(uint64_t generator, Stream& member, const Lock&);
  Stream& generatorHome(uint64_t generator, const Lock&);
  uint64_t defaultGenerator(c10::DeviceIndex index) const {
    return !single() && index == 0 ? wire::kLeaseGenerator : 0;
  }

  // --- transfers (transfers.cpp). The range is [base + offset, + bytes) of one segment.
  void upload(wire::Address base, uint64_t offset, const void* from, uint64_t bytes,
              bool non_blocking);
  void download(wire::Address base, uint64_t offset, void* to, uint64_t bytes, bool non_blocking);
  // Within the lease: between devices worker to worker, not through the client.
  void copyAcross(wire::Address to_base, uint64_t to_offset, wire::Address from_base,
                  uint64_t from_offset, uint64_t bytes);
  // The whole segment from another one, on another device, when it is used first; or sooner, before
  // the source changes (owed.cpp). False if that can't be put off.
  bool copyLater(wire::Address to_base, wire::Address from_base);
  // Adds numbers of another device of the lease, without a copy of them on the own. False if it
  // can't be done so.
  bool addAcross(wire::Address to_base, uint64_t to_offset, wire::Address from_base,
                 uint64_t from_offset, uint64_t bytes, at::ScalarType type);
  // What reader `number` at the member's node has read at `from` of its memory, of which the client
  // sees nothing. Returns the number of the last message: from then on that memory may change.
  uint64_t load(wire::Address base, uint64_t offset, uint64_t bytes, size_t member, uint64_t number,
                uint64_t from);
  // Gives back a host block once `member` is past `sequence`.
  void releaseHostAfter(uint64_t host_offset, Stream& member, uint64_t sequence);

  // --- memory shared with other sessions (sharing.cpp). Raise shoal.ShareError.
  // Moves the segment, and all that is in it, to the memory behind `fds` on `member`, its only
  // copy.
  void share(wire::Address base, size_t member, const SharedDescriptors& fds, wire::ShareMode mode);
  // A new segment of the whole lease in memory that another session shares.
  wire::Address openShared(uint64_t bytes, size_t member, const SharedDescriptors& fds,
                           wire::ShareMode mode);
  // Moves a shared segment back to memory of its own.
  void unshare(wire::Address base);
  bool isShared(wire::Address base);

  // --- state
  // Waits (without the lock) until the device's members have taken most of what was sent.
  void awaitRoom(c10::DeviceIndex index) {
    if (index > 0) return deviceMember(index).awaitRoom();
    for (auto& member : members_) member->awaitRoom();
  }
  void synchronize(c10::DeviceIndex index);
  bool idle(c10::DeviceIndex index);
  void close() noexcept;
  void abandon() noexcept;
  bool usable() const;
  MemoryUse memoryUse(c10::DeviceIndex index);
  void resetPeak();
  Traffic traffic(c10::DeviceIndex index);
  void trim();
  // Raises what went wrong on members other than this one, if anything did.
  void raiseFailureOfOthers(const Stream& than);

  // One live segment, for the map of the address space.
  struct Entry {
    wire::Address address;
    uint64_t bytes;
    uint32_t bound, valid;
    uint32_t resident;  // members that have it in their memory now, and not in swap space
    int home;
    int pinned;
    wire::Address part_of;  // the wide segment that it is an extent of; 0: none
    uint64_t version;       // number of the home's message that wrote it last
    int64_t frame;          // where it is in its home's memory; -1: not there, or not told
    bool shared;            // other programs have it too
  };
  std::vector<Entry> map();
  // The bytes of a segment in the memory of each device of this machine that has them, by member.
  std::vector<std::pair<uint32_t, std::string>> copies(wire::Address base);

  // Who is told of releases, by whatever thread; null: nobody. One at a time: false if there is
  // one.
  bool recordTo(Recording* recording, const Lock&) {
    if (recording != nullptr && recording_ != nullptr) return false;
    recording_ = recording;
    return true;
  }

  // --- the trace of accesses, for those who ask what a pager should have done
  enum class Access : uint8_t { kRead = 0, kWrite = 1, kMake = 2, kFree = 3, kUpload = 4 };
  struct TraceEvent {
    uint64_t call;  // events of one call need their segments together
    Access access;
    wire::Address address;
    uint64_t bytes;
    uint32_t member;
  };
  void startTrace();
  std::vector<TraceEvent> stopTrace();
  void traceCall(c10::ArrayRef<SegmentUse> uses, c10::ArrayRef<wire::Address> made,
                 const Stream& member, const Lock&) {
    if (!tracing_) return;
    ++traced_calls_;
    for (const SegmentUse& use : uses) {
      trace(use.writes ? Access::kWrite : Access::kRead, use.base, member.member());
    }
    for (const wire::Address address : made) {
      if (address != 0) trace(Access::kMake, address, member.member());
    }
  }

 private:
  struct Segment {
    uint64_t bytes = 0;
    uint64_t host_block = 0;   // offset + 1 of the host block that the segment lives in; 0: none
    uint64_t written_at = 0;   // sequence number on its home
    uint64_t used_at = 0;      // in calls of this session; kept where there are members
    uint32_t bound = 0;        // members that have memory for it
    uint32_t valid = 0;        // of these, those with its present bytes
    uint32_t host_member = 0;  // the member that lives in the host block
    int8_t home = -1;          // the member that wrote it last
    int8_t pinned = -1;        // the member whose device it belongs to; -1: the whole lease's
    bool live = false;
    bool shared = false;  // in memory that other sessions have too: on its home, and only there
    bool owes = false;    // copies of it are owed: see debts_
    wire::Address part_of = 0;
    wire::Address owed_from = 0;  // whose bytes it gets when it is used; it has none until then
  };
  struct HostRelease {
    uint64_t offset;
    c10::SmallVector<uint64_t, 2> after;  // by member: its sequence number
  };

  Segment& at(wire::Address base) { return segments_[wire::slotOf(base)]; }
  const Segment& at(wire::Address base) const { return segments_[wire::slotOf(base)]; }
  uint32_t takeSlots(uint64_t count);
  void giveSlots(uint32_t slot, uint64_t count);
  wire::Address bindWide(Extents extents, c10::DeviceIndex index, const Lock&);
  void releaseWide(wire::Address base, const Lock&) noexcept;
  template <typename Move>
  void eachExtent(wire::Address base, uint64_t offset, uint64_t bytes, const Move& move);
  void bringFrom(wire::Address base, Segment& segment, Stream& member, const Lock&);
  void fetch(wire::Address base, Segment& segment, Stream& to, const Lock&);
  uint64_t postFetch(Stream& to, wire::Address target, Stream& from, wire::Address from_base,
                     uint64_t from_offset, uint64_t bytes, const Lock&);
  // --- owed copies (owed.cpp)
  // No address, but the number of the member, plus 1, that was lost with the source.
  static bool isGone(wire::Address owed_from) { return owed_from <= kMembersMax; }
  void collect(wire::Address base, const Lock&);
  void forgive(wire::Address base);
  void settle(wire::Address base, const Lock&);
  void overwrite(wire::Address base, const Lock&);  // all of it changes, whatever it holds
  void endDebts(wire::Address base, const Lock&) noexcept;
  void invalidate(wire::Address base, Stream& member, uint64_t sequence, const Lock&);
  void dropCopy(wire::Address base, Segment& segment, Stream& member, const Lock&);
  void dropReplicas(Stream& member, uint64_t goal, const Lock&);
  void moveHome(Segment& segment, Stream& member);
  void promote(Segment& segment);
  void releaseLocked(wire::Address address, const Lock&) noexcept;
  void releaseHostLater(uint64_t offset, const Lock&);
  uint64_t roomOf(const Stream& member) const;  // in its memory
  uint64_t leftOf(const Stream& member) const;  // in memory and swap space
  static uint64_t limitOf(const Stream& member) {
    return member.options().memory_bytes + member.options().spill_bytes;
  }
  std::vector<uint32_t> leastUsed(const Stream& member) const;
  Stream* emptiest(const Stream& but, uint64_t bytes) const;
  Stream& homeOrPlace(wire::Address base, const Lock&);
  [[noreturn]] void raiseOutOfMemory(uint64_t bytes, c10::DeviceIndex index) const;

  void reclaimHost(const Lock&);
  uint64_t stage(const void* from, uint64_t bytes);
  void uploadPinned(wire::Address base, uint64_t offset, const void* from, uint64_t bytes,
                    bool non_blocking);
  void uploadStaged(wire::Address base, uint64_t offset, uint64_t block, uint64_t bytes);
  bool uploadDirect(wire::Address base, uint64_t offset, const void* from, uint64_t bytes);
  void downloadDirect(wire::Address from, Stream& home, void* to, uint64_t bytes);
  template <typename Copy>
  uint64_t postTransfer(Stream& member, wire::Address address, uint64_t bytes, const void* host,
                        const Lock&);
  void adopt(wire::Address base, Segment& segment, Stream& member, uint64_t block, const Lock&);
  bool settled(Stream& home) const;
  bool readInPlace(wire::Address base, uint64_t offset, void* to, uint64_t bytes, Stream& home);
  void downloadStaged(wire::Address from, Stream& home, void* to, uint64_t bytes);
  void countTransfer(Stream& member, uint64_t in, uint64_t out, uint64_t copied);

  void trace(Access access, wire::Address base, uint32_t member) {
    trace_.push_back({traced_calls_, access, base, at(base).bytes, member});
  }

  uint32_t number_;
  Recording* recording_ = nullptr;
  bool tracing_ = false;
  uint64_t traced_calls_ = 0;
  std::vector<TraceEvent> trace_;
  std::vector<std::unique_ptr<Stream>> members_;
  std::vector<uint64_t> used_bytes_;    // by member: of all segments bound there
  std::vector<uint64_t> pinned_bytes_;  // by member: of the live segments of its device
  std::mutex mutex_;
  std::vector<Segment> segments_;  // by slot
  std::vector<uint32_t> free_slots_;
  std::map<uint64_t, std::vector<uint32_t>> free_runs_;  // of segments of several slots, by count
  uint32_t next_slot_ = 1;
  uint64_t shared_number_ = 0;  // of the shared memory that was passed last
  uint64_t calls_ = 0;          // the clock of `used_at`
  std::atomic<uint64_t> live_segments_{0};
  MemoryUse memory_;
  std::unordered_map<uint64_t, uint32_t> generator_home_;
  std::unordered_map<uint32_t, std::unique_ptr<Extents>> wide_;  // by slot
  // By the slot of a segment: those that get its bytes when they are used.
  std::unordered_map<uint32_t, std::vector<wire::Address>> debts_;
  uint64_t largest_memory_ = 0;  // of the members
  uint64_t whole_bytes_max_ = UINT64_MAX;
  std::deque<HostRelease> host_releases_;
};

}  // namespace shoal::client
