#include "client/space/transfers.h"

#include <algorithm>
#include <cstring>

#include "client/member/interrupts.h"
#include "client/space/host_memory.h"
#include "client/space/sharded_segments.h"
#include "memory/copy_bytes.h"
#include "network/frames.h"
#include "wire/limits.h"

namespace shoal::client {

using wire::Address;

namespace {

constexpr uint64_t kStagedBytesMax = uint64_t{256} << 20;  // sent, but not yet taken by the worker
constexpr size_t kStagedBlocksMax = 64;
// From this size on, memory goes to another machine without a copy: the caller waits while it
// leaves.
constexpr uint64_t kDirectBytesMin = uint64_t{4} << 20;

// Calls `move(extent, offset in it, bytes)` for each extent of a range of a sharded segment.
template <typename Move>
void eachExtent(Session& session, Address base, uint64_t offset, uint64_t bytes, const Move& move) {
  for (const Extent& extent : *extentsOf(session, base)) {
    if (offset >= extent.start + extent.bytes) continue;
    if (bytes == 0) return;
    const uint64_t within = offset - extent.start;
    const uint64_t n = std::min(bytes, extent.bytes - within);
    move(extent.base, within, n);
    offset += n;
    bytes -= n;
  }
}

// Copies pageable memory into a host block: the only copy that the client makes.
uint64_t stage(Session& session, const void* from, uint64_t bytes) {
  {
    const Lock held = session.lock();
    session.hostReleases(held).reclaim();
  }
  HostMemory& host = HostMemory::get();
  const uint64_t offset = host.allocate(bytes);
  memory::copyBytes(host.at(offset), from, bytes);
  return offset;
}

// Posts a CopyIn or CopyOut between `host` and the member's memory; between machines several of
// them. Returns the sequence number of the last one.
template <typename Copy>
uint64_t postTransfer(Member& member, Address address, uint64_t bytes, const void* host,
                      const Lock& held) {
  if (member.link() == nullptr) {
    return member.post(Copy{address, bytes, HostMemory::get().offsetOf(host)}, held);
  }
  const auto start = reinterpret_cast<uint64_t>(host);
  uint64_t sequence = 0;
  for (uint64_t at = 0; at < bytes; at += network::kChunkBytes) {
    const uint64_t chunk = std::min(network::kChunkBytes, bytes - at);
    sequence = member.post(Copy{address + at, chunk, start + at}, held);
  }
  return sequence;
}

void countTransfer(Session& session, Member& member, uint64_t in, uint64_t out, uint64_t copied) {
  const Lock held = session.lock();
  Traffic& traffic = member.traffic(held);
  traffic.bytes_in += in;
  traffic.bytes_out += out;
  traffic.bytes_copied += copied;
}

// Straight from the program's memory to a machine elsewhere. False if the member is on this one.
bool uploadDirect(Session& session, Address base, uint64_t offset, const void* from,
                  uint64_t bytes) {
  Member* member;
  uint64_t sequence;
  {
    const Lock held = session.lock();
    member = &session.homeOrPlace(base, held);
    if (member->link() == nullptr) return false;
    session.bringToWrite(base, *member, held);
    sequence = postTransfer<wire::CopyIn>(*member, base + offset, bytes, from, held);
    session.wrote(base, *member, sequence, held);
    member->traffic(held).bytes_in += bytes;
  }
  for (Wait wait; !member->link()->awaitSent(sequence, /*timeout_ms=*/50);) wait.look();
  return true;
}

void uploadPinned(Session& session, Address base, uint64_t offset, const void* from, uint64_t bytes,
                  bool non_blocking) {
  HostMemory& host = HostMemory::get();
  Member* member;
  uint64_t sequence;
  {
    const Lock held = session.lock();
    member = &session.homeOrPlace(base, held);
    session.bringToWrite(base, *member, held);
    sequence = postTransfer<wire::CopyIn>(*member, base + offset, bytes, from, held);
    session.wrote(base, *member, sequence, held);
    member->traffic(held).bytes_in += bytes;
  }
  host.usedBy(from, *member, sequence);
  if (!non_blocking) member->waitDone(sequence);
}

// The whole segment is new: the staged block itself becomes its memory.
void adopt(Session& session, Address base, Member& member, uint64_t block, const Lock& held) {
  session.overwrite(base, held);
  Directory& directory = session.directory(held);
  const Segment& segment = directory.at(base);
  const uint64_t sequence = member.post(wire::Adopt{base, segment.bytes, block}, held);
  if (AccessTrace& trace = session.trace(held); trace.active()) {
    trace.beginCall();
    trace.note(Access::kUpload, base, member.number(), directory);
  }
  if (segment.bound == 0) {
    session.made(base, member, sequence, held);
  } else {
    session.wrote(base, member, sequence, held);
  }
  const uint64_t before = directory.setHostBlock(base, member.number(), block);
  if (before != 0) session.hostReleases(held).add(before - 1);
}

void uploadStaged(Session& session, Address base, uint64_t offset, uint64_t block, uint64_t bytes) {
  Member* member;
  uint64_t wait_for = 0;
  {
    const Lock held = session.lock();
    member = &session.homeOrPlace(base, held);
    const Segment& segment = session.directory(held).at(base);
    member->traffic(held).bytes_in += bytes;
    member->traffic(held).bytes_copied += bytes;
    if (member->arena().data() != nullptr && offset == 0 && bytes == segment.bytes &&
        !segment.shared) {
      return adopt(session, base, *member, block, held);
    }
    session.bringToWrite(base, *member, held);
    const uint64_t sequence = postTransfer<wire::CopyIn>(*member, base + offset, bytes,
                                                         HostMemory::get().at(block), held);
    session.wrote(base, *member, sequence, held);
    HostReleases& releases = session.hostReleases(held);
    releases.add(block);
    if (bytes > kStagedBytesMax || releases.size() > kStagedBlocksMax) {
      wait_for = releases.half(*member);
    }
  }
  if (wait_for != 0) member->waitDone(wait_for);
}

// Nothing that was sent can still change the member's memory: then a read needs no message at all.
bool settled(Member& home) {
  if (!home.usable() || !home.isDone(home.lastSequence()) || home.hasFailed()) return false;
  home.liveness().checkSometimes();
  return true;
}

// Copies from where the member says that the segment is. False if it is nowhere that we see, or was
// moved meanwhile.
bool readInPlace(Session& session, Address base, uint64_t offset, void* to, uint64_t bytes,
                 Member& home) {
  using transport::LocationTable;
  const uint32_t slot = wire::slotOf(base);
  const uint64_t word = home.locations().word(slot);
  const std::byte* from = nullptr;
  try {
    const auto host = HostMemory::exists() ? HostMemory::get().span() : LocationTable::Region{};
    from = LocationTable::find(word, offset, bytes, home.arena().span(), host);
  } catch (const wire::ProtocolError& error) {
    home.raiseLost(error.what());
  }
  if (from == nullptr) return false;
  memory::copyBytes(to, from, bytes);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (home.locations().word(slot) != word) return false;
  countTransfer(session, home, 0, bytes, bytes);
  return true;
}

// Straight from a machine elsewhere into the program's memory.
void downloadDirect(Session& session, Address from, Member& home, void* to, uint64_t bytes) {
  try {
    {
      const Lock held = session.lock();
      postTransfer<wire::CopyOut>(home, from, bytes, to, held);
    }
    home.synchronize();
  } catch (...) {
    // An operator's error comes behind the bytes. A lost device may be in the middle of them.
    if (!home.usable()) home.link()->stop();
    throw;
  }
  countTransfer(session, home, 0, bytes, 0);
}

// From a device whose memory we do not see: through a block of host memory.
void downloadStaged(Session& session, Address from, Member& home, void* to, uint64_t bytes) {
  HostMemory& host = HostMemory::get();
  const uint64_t block = host.allocate(bytes);
  const uint64_t sequence = home.post(wire::CopyOut{from, bytes, block});
  try {
    home.synchronize();
  } catch (...) {
    const Lock held = session.lock();
    session.hostReleases(held).add(block, home, sequence);
    throw;
  }
  memory::copyBytes(to, host.at(block), bytes);
  host.release(block);
  countTransfer(session, home, 0, bytes, bytes);
}

}  // namespace

void upload(Session& session, Address base, uint64_t offset, const void* from, uint64_t bytes,
            bool non_blocking) {
  if (bytes == 0) return;
  CallLines::note();
  if (Observer* observer = Observer::current()) {
    observer->uploaded(base, offset, from, bytes, session.lock());
  }
  const Observer::Aside aside;
  if (extentsOf(session, base) != nullptr) {
    return eachExtent(session, base, offset, bytes, [&](Address extent, uint64_t at, uint64_t n) {
      upload(session, extent, at, from, n, non_blocking);
      from = static_cast<const std::byte*>(from) + n;
    });
  }
  const bool pinned = HostMemory::exists() && HostMemory::get().contains(from);
  if (bytes <= wire::kInlineBytesMax && !(pinned && HostMemory::get().inUse(from, bytes))) {
    const Lock held = session.lock();
    Member& member = session.homeOrPlace(base, held);
    session.bringToWrite(base, member, held);
    const wire::Write message{base + offset, {static_cast<const char*>(from), bytes}};
    session.wrote(base, member, member.post(message, held), held);
    member.traffic(held).bytes_in += bytes;
    member.traffic(held).bytes_copied += bytes;
    return;
  }
  if (pinned) return uploadPinned(session, base, offset, from, bytes, non_blocking);
  if (bytes >= kDirectBytesMin && uploadDirect(session, base, offset, from, bytes)) return;
  uploadStaged(session, base, offset, stage(session, from, bytes), bytes);
}

void download(Session& session, Address base, uint64_t offset, void* to, uint64_t bytes,
              bool non_blocking) {
  if (bytes == 0) return;
  Observer::giveUp("a value is read from the device");
  if (extentsOf(session, base) != nullptr) {
    return eachExtent(session, base, offset, bytes, [&](Address extent, uint64_t at, uint64_t n) {
      download(session, extent, at, to, n, non_blocking);
      to = static_cast<std::byte*>(to) + n;
    });
  }
  Member* home;
  bool quiet;
  {
    const Lock held = session.lock();
    home = &session.homeOrPlace(base, held);
    session.bring(base, *home, held);
    quiet = settled(*home);
  }
  const bool pinned = HostMemory::exists() && HostMemory::get().contains(to);
  if (pinned && (non_blocking || bytes > wire::kInlineBytesMax)) {
    uint64_t sequence;
    {
      const Lock held = session.lock();
      sequence = postTransfer<wire::CopyOut>(*home, base + offset, bytes, to, held);
    }
    countTransfer(session, *home, 0, bytes, 0);
    HostMemory::get().usedBy(to, *home, sequence);
    if (!non_blocking) home->synchronize();
    return;
  }
  if (quiet && readInPlace(session, base, offset, to, bytes, *home)) return;
  if (bytes <= wire::kInlineBytesMax) {
    const auto payload = home->request(wire::Read{{base + offset, bytes}});
    if (payload.size() * 8 < bytes) home->raiseLost("it sent too few bytes");
    std::memcpy(to, payload.data(), bytes);
    return countTransfer(session, *home, 0, bytes, bytes);
  }
  if (home->arena().data() != nullptr) {
    // Waits for everything so far, and brings the segment to where we see it.
    home->request(wire::Locate{{base + offset, bytes}});
    if (readInPlace(session, base, offset, to, bytes, *home)) return;
  }
  if (home->link() != nullptr) return downloadDirect(session, base + offset, *home, to, bytes);
  downloadStaged(session, base + offset, *home, to, bytes);
}

void copyAcross(Session& session, Address to_base, uint64_t to_offset, Address from_base,
                uint64_t from_offset, uint64_t bytes) {
  if (bytes == 0) return;
  CallLines::note();
  if (extentsOf(session, from_base) != nullptr) {
    return eachExtent(session, from_base, from_offset, bytes,
                      [&](Address extent, uint64_t at, uint64_t n) {
                        copyAcross(session, to_base, to_offset, extent, at, n);
                        to_offset += n;
                      });
  }
  if (extentsOf(session, to_base) != nullptr) {
    return eachExtent(session, to_base, to_offset, bytes,
                      [&](Address extent, uint64_t at, uint64_t n) {
                        copyAcross(session, extent, at, from_base, from_offset, n);
                        from_offset += n;
                      });
  }
  const Lock held = session.lock();
  Member& from = session.homeOrPlace(from_base, held);
  if (session.home(to_base, held) == nullptr) {  // beside its source, if there is room
    const SegmentUse uses[] = {{from_base, false}, {to_base, true}};
    Member& member = session.place(uses, session.deviceOf(to_base, held), 0, held);
    session.makeRoom(member, uses, 0, held);
    session.bring(to_base, member, held);
  }
  Member& to = session.homeOrPlace(to_base, held);
  session.bringToWrite(to_base, to, held);
  session.bring(from_base, from, held);
  uint64_t sequence;
  if (&to == &from) {
    sequence = to.post(wire::CopyWithin{to_base + to_offset, from_base + from_offset, bytes}, held);
  } else {
    sequence =
        session.postFetch(to, to_base + to_offset, from, from_base, from_offset, bytes, held);
  }
  session.wrote(to_base, to, sequence, held);
}

bool addAcross(Session& session, Address to_base, uint64_t to_offset, Address from_base,
               uint64_t from_offset, uint64_t bytes, c10::ScalarType type) {
  if (extentsOf(session, from_base) != nullptr || extentsOf(session, to_base) != nullptr) {
    return false;
  }
  CallLines::note();
  const Lock held = session.lock();
  Member* from = session.home(from_base, held);
  Member* to = session.home(to_base, held);
  if (from == nullptr || to == nullptr || from == to) return false;
  session.bringToWrite(to_base, *to, held);
  session.bring(from_base, *from, held);
  const uint64_t reading = to->requests(held).nextSequence(held);
  const uint64_t exported = from->post(wire::Export{from_base, to->number(), reading}, held);
  const uint64_t sequence =
      to->post(wire::FetchAdd{.fetch = {.to = to_base + to_offset,
                                        .from = from_base + from_offset,
                                        .bytes = bytes,
                                        .peer = from->number(),
                                        .written = session.directory(held).at(from_base).written_at,
                                        .exported = exported},
                              .dtype = static_cast<uint8_t>(type)},
               held);
  to->traffic(held).bytes_peer += bytes;
  session.wrote(to_base, *to, sequence, held);
  return true;
}

uint64_t load(Session& session, Address base, uint64_t offset, uint64_t bytes, size_t number,
              uint64_t reader, uint64_t from) {
  CallLines::note();
  if (extentsOf(session, base) != nullptr) {
    uint64_t last = 0;
    eachExtent(session, base, offset, bytes, [&](Address extent, uint64_t at, uint64_t n) {
      last = load(session, extent, at, n, number, reader, from);
      from += n;
    });
    return last;
  }
  const Lock held = session.lock();
  Member& member = session.member(number);
  member.checkUsable();
  const SegmentUse use{base, true};
  session.makeRoom(member, use, 0, held);
  session.bringToWrite(base, member, held);
  const uint64_t sequence = member.post(wire::Load{base + offset, bytes, reader, from}, held);
  session.wrote(base, member, sequence, held);
  member.traffic(held).bytes_node += bytes;
  return sequence;
}

std::vector<std::pair<uint32_t, std::string>> copiesOf(Session& session, Address base) {
  Segment segment;
  {
    const Lock held = session.lock();
    TORCH_CHECK(session.directory(held).segments().known(base),
                "no segment starts at this address");
    segment = session.directory(held).at(base);
  }
  std::vector<std::pair<uint32_t, std::string>> found;
  for (size_t i = 0; i < session.size(); ++i) {
    Member& member = session.member(i);
    if (member.link() != nullptr || (segment.valid & member.bit()) == 0) continue;
    std::string bytes(segment.bytes, '\0');
    if (readInPlace(session, base, 0, bytes.data(), bytes.size(), member)) {
      found.emplace_back(member.number(), std::move(bytes));
    }
  }
  return found;
}

}  // namespace shoal::client
