// Bytes between the program's memory and a segment. A request holds addresses; the bytes go
// straight between the two memories.
#include <algorithm>
#include <cstring>

#include "client/member/interrupts.h"
#include "client/replay/recording.h"
#include "client/sharded/sharded_tensor.h"
#include "client/space/host_memory.h"
#include "client/space/session.h"
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

}  // namespace

// Calls `move(extent, offset in it, bytes)` for each piece of a range of a wide segment.
template <typename Move>
void Session::eachExtent(Address base, uint64_t offset, uint64_t bytes, const Move& move) {
  for (const Extent& extent : *extents(base)) {
    if (offset >= extent.start + extent.bytes) continue;
    if (bytes == 0) return;
    const uint64_t within = offset - extent.start;
    const uint64_t n = std::min(bytes, extent.bytes - within);
    move(extent.base, within, n);
    offset += n;
    bytes -= n;
  }
}

// --- host blocks

void Session::releaseHostLater(uint64_t offset, const Lock&) {
  HostRelease release{offset, {}};
  for (const auto& member : members_) release.after.push_back(member->lastSequence());
  host_releases_.push_back(std::move(release));
}

void Session::releaseHostAfter(uint64_t offset, Stream& member, uint64_t sequence) {
  const Lock held = lock();
  HostRelease release{offset, {}};
  release.after.resize(size(), 0);
  release.after[member.member()] = sequence;
  host_releases_.push_back(std::move(release));
}

void Session::reclaimHost(const Lock&) {
  while (!host_releases_.empty()) {
    const auto& after = host_releases_.front().after;
    for (size_t i = 0; i < after.size(); ++i) {
      if (members_[i]->usable() && !members_[i]->completed(after[i])) return;
    }
    HostMemory::get().release(host_releases_.front().offset);
    host_releases_.pop_front();
  }
}

// Copies pageable memory into a host block: the only copy that the client makes.
uint64_t Session::stage(const void* from, uint64_t bytes) {
  {
    const Lock held = lock();
    reclaimHost(held);
  }
  HostMemory& host = HostMemory::get();
  const uint64_t offset = host.allocate(bytes);
  memory::copyBytes(host.at(offset), from, bytes);
  return offset;
}

// A CopyIn or CopyOut between `host` and the member's memory; between machines several of them.
// Returns the sequence number of the last one.
template <typename Copy>
uint64_t Session::postTransfer(Stream& member, Address address, uint64_t bytes, const void* host,
                               const Lock& held) {
  if (member.link() == nullptr) {
    return member.post(Copy{address, bytes, HostMemory::get().offsetOf(host)}, held);
  }
  const auto start = reinterpret_cast<uint64_t>(host);
  uint64_t sequence = 0;
  for (uint64_t at = 0; at < bytes; at += network::kPieceBytes) {
    const uint64_t piece = std::min(network::kPieceBytes, bytes - at);
    sequence = member.post(Copy{address + at, piece, start + at}, held);
  }
  return sequence;
}

// --- to the device

// The member that holds the segment, or, where nothing is behind it yet, will hold it.
Stream& Session::homeOrPlace(Address base, const Lock& held) {
  Stream* home = this->home(base, held);
  if (home == nullptr) {
    const SegmentUse use{base, true};
    home = &place(use, deviceOf(base, held), 0, held);
    makeRoom(*home, use, 0, held);
  }
  home->checkUsable();
  return *home;
}

void Session::upload(Address base, uint64_t offset, const void* from, uint64_t bytes,
                     bool non_blocking) {
  if (bytes == 0) return;
  Stream::noteLine();
  if (Recording* recording = Recording::current()) {
    recording->uploaded(base, offset, from, bytes, lock());
  }
  const Recording::Aside aside;
  if (anyWide() && extents(base) != nullptr) {
    return eachExtent(base, offset, bytes, [&](Address extent, uint64_t at, uint64_t n) {
      upload(extent, at, from, n, non_blocking);
      from = static_cast<const std::byte*>(from) + n;
    });
  }
  const bool pinned = HostMemory::exists() && HostMemory::get().contains(from);
  if (bytes <= wire::kInlineBytesMax && !(pinned && HostMemory::get().inUse(from, bytes))) {
    const Lock held = lock();
    Stream& member = homeOrPlace(base, held);
    bringToWrite(base, member, held);
    const wire::Write message{base + offset, {static_cast<const char*>(from), bytes}};
    wrote(base, member, member.post(message, held), held);
    member.traffic(held).bytes_in += bytes;
    member.traffic(held).bytes_copied += bytes;
    return;
  }
  if (pinned) return uploadPinned(base, offset, from, bytes, non_blocking);
  if (bytes >= kDirectBytesMin && uploadDirect(base, offset, from, bytes)) return;
  uploadStaged(base, offset, stage(from, bytes), bytes);
}

// Straight from the program's memory to a machine elsewhere. False if the member is on this one.
bool Session::uploadDirect(Address base, uint64_t offset, const void* from, uint64_t bytes) {
  Stream* member;
  uint64_t sequence;
  {
    const Lock held = lock();
    member = &homeOrPlace(base, held);
    if (member->link() == nullptr) return false;
    bringToWrite(base, *member, held);
    sequence = postTransfer<wire::CopyIn>(*member, base + offset, bytes, from, held);
    wrote(base, *member, sequence, held);
    member->traffic(held).bytes_in += bytes;
  }
  for (Wait wait; !member->link()->awaitSent(sequence, /*timeout_ms=*/50);) wait.look();
  return true;
}

void Session::uploadPinned(Address base, uint64_t offset, const void* from, uint64_t bytes,
                           bool non_blocking) {
  HostMemory& host = HostMemory::get();
  Stream* member;
  uint64_t sequence;
  {
    const Lock held = lock();
    member = &homeOrPlace(base, held);
    bringToWrite(base, *member, held);
    sequence = postTransfer<wire::CopyIn>(*member, base + offset, bytes, from, held);
    wrote(base, *member, sequence, held);
    member->traffic(held).bytes_in += bytes;
  }
  host.usedBy(from, *member, sequence);
  if (!non_blocking) member->waitCompleted(sequence);
}

void Session::uploadStaged(Address base, uint64_t offset, uint64_t block, uint64_t bytes) {
  Stream* member;
  uint64_t wait_for = 0;
  {
    const Lock held = lock();
    member = &homeOrPlace(base, held);
    Segment& segment = at(base);
    member->traffic(held).bytes_in += bytes;
    member->traffic(held).bytes_copied += bytes;
    if (member->arena().data() != nullptr && offset == 0 && bytes == segment.bytes &&
        !segment.shared) {
      return adopt(base, segment, *member, block, held);
    }
    bringToWrite(base, *member, held);
    const uint64_t sequence = postTransfer<wire::CopyIn>(*member, base + offset, bytes,
                                                         HostMemory::get().at(block), held);
    wrote(base, *member, sequence, held);
    releaseHostLater(block, held);
    if (bytes > kStagedBytesMax || host_releases_.size() > kStagedBlocksMax) {
      wait_for = host_releases_[host_releases_.size() / 2].after[member->member()];
    }
  }
  if (wait_for != 0) member->waitCompleted(wait_for);
}

// The whole segment is new: the staged block itself becomes its memory.
void Session::adopt(Address base, Segment& segment, Stream& member, uint64_t block,
                    const Lock& held) {
  overwrite(base, held);
  const uint64_t sequence = member.post(wire::Adopt{base, segment.bytes, block}, held);
  if (tracing_) {
    ++traced_calls_;
    trace(Access::kUpload, base, member.member());
  }
  if (segment.host_block != 0) releaseHostLater(segment.host_block - 1, held);
  if (segment.bound == 0) {
    made(base, member, sequence, held);
  } else {
    wrote(base, member, sequence, held);
  }
  segment.host_block = block + 1;
  segment.host_member = member.member();
}

// --- from the device

// Nothing that was sent can still change the member's memory: then a read needs no message at all.
bool Session::settled(Stream& home) const {
  if (!home.usable() || !home.idle() || home.hasFailed()) return false;
  home.checkSometimes();
  return true;
}

// Copies from where the member says that the segment is. False if it is nowhere that we see, or was
// moved meanwhile.
bool Session::readInPlace(Address base, uint64_t offset, void* to, uint64_t bytes, Stream& home) {
  using transport::Places;
  const uint32_t slot = wire::slotOf(base);
  const uint64_t word = home.places().word(slot);
  if (!Places::present(word)) return false;
  const bool in_host = Places::inHost(word);
  if (in_host && !HostMemory::exists()) return false;
  const uint64_t limit = in_host ? HostMemory::get().bytes() : home.arena().bytes();
  const uint64_t start = Places::offset(word);
  if (start > limit || offset > limit - start || bytes > limit - start - offset) {
    home.raiseLost("it named memory that does not exist");
  }
  const std::byte* from = in_host ? HostMemory::get().at(start) : home.arena().data() + start;
  memory::copyBytes(to, from + offset, bytes);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (home.places().word(slot) != word) return false;
  countTransfer(home, 0, bytes, bytes);
  return true;
}

std::vector<std::pair<uint32_t, std::string>> Session::copies(wire::Address base) {
  Segment segment;
  {
    const Lock held = lock();
    TORCH_CHECK(wire::slotOf(base) < next_slot_ && at(base).live, "no segment starts there");
    segment = at(base);
  }
  std::vector<std::pair<uint32_t, std::string>> found;
  for (const auto& member : members_) {
    if (member->link() != nullptr || (segment.valid & member->bit()) == 0) continue;
    std::string bytes(segment.bytes, '\0');
    if (readInPlace(base, 0, bytes.data(), bytes.size(), *member)) {
      found.emplace_back(member->member(), std::move(bytes));
    }
  }
  return found;
}

void Session::download(Address base, uint64_t offset, void* to, uint64_t bytes, bool non_blocking) {
  if (bytes == 0) return;
  Recording::giveUp("a value is read from the device");
  if (anyWide() && extents(base) != nullptr) {
    return eachExtent(base, offset, bytes, [&](Address extent, uint64_t at, uint64_t n) {
      download(extent, at, to, n, non_blocking);
      to = static_cast<std::byte*>(to) + n;
    });
  }
  Stream* home;
  bool quiet;
  {
    const Lock held = lock();
    home = &homeOrPlace(base, held);
    bring(base, *home, held);
    quiet = settled(*home);
  }
  const bool pinned = HostMemory::exists() && HostMemory::get().contains(to);
  if (pinned && (non_blocking || bytes > wire::kInlineBytesMax)) {
    uint64_t sequence;
    {
      const Lock held = lock();
      sequence = postTransfer<wire::CopyOut>(*home, base + offset, bytes, to, held);
    }
    countTransfer(*home, 0, bytes, 0);
    HostMemory::get().usedBy(to, *home, sequence);
    if (!non_blocking) home->synchronize();
    return;
  }
  if (quiet && readInPlace(base, offset, to, bytes, *home)) return;
  if (bytes <= wire::kInlineBytesMax) {
    const auto payload = home->request(wire::Read{{base + offset, bytes}});
    if (payload.size() * 8 < bytes) home->raiseLost("it sent too few bytes");
    std::memcpy(to, payload.data(), bytes);
    return countTransfer(*home, 0, bytes, bytes);
  }
  if (home->arena().data() != nullptr) {
    // Waits for everything so far, and brings the segment to where we see it.
    home->request(wire::Locate{{base + offset, bytes}});
    if (readInPlace(base, offset, to, bytes, *home)) return;
  }
  if (home->link() != nullptr) return downloadDirect(base + offset, *home, to, bytes);
  downloadStaged(base + offset, *home, to, bytes);
}

// Straight from a machine elsewhere into the program's memory.
void Session::downloadDirect(Address from, Stream& home, void* to, uint64_t bytes) {
  try {
    {
      const Lock held = lock();
      postTransfer<wire::CopyOut>(home, from, bytes, to, held);
    }
    home.synchronize();
  } catch (...) {
    // An operator's error comes behind the bytes. A lost device may be in the middle of them.
    if (!home.usable()) home.link()->stop();
    throw;
  }
  countTransfer(home, 0, bytes, 0);
}

// From a device whose memory we do not see: through a block of host memory.
void Session::downloadStaged(Address from, Stream& home, void* to, uint64_t bytes) {
  HostMemory& host = HostMemory::get();
  const uint64_t block = host.allocate(bytes);
  const uint64_t sequence = home.post(wire::CopyOut{from, bytes, block});
  try {
    home.synchronize();
  } catch (...) {
    releaseHostAfter(block, home, sequence);
    throw;
  }
  memory::copyBytes(to, host.at(block), bytes);
  host.release(block);
  countTransfer(home, 0, bytes, bytes);
}

void Session::countTransfer(Stream& member, uint64_t in, uint64_t out, uint64_t copied) {
  const Lock held = lock();
  Traffic& traffic = member.traffic(held);
  traffic.bytes_in += in;
  traffic.bytes_out += out;
  traffic.bytes_copied += copied;
}

// --- at the node

uint64_t Session::load(Address base, uint64_t offset, uint64_t bytes, size_t number,
                       uint64_t reader, uint64_t from) {
  Stream::noteLine();
  if (anyWide() && extents(base) != nullptr) {
    uint64_t last = 0;
    eachExtent(base, offset, bytes, [&](Address extent, uint64_t at, uint64_t n) {
      last = load(extent, at, n, number, reader, from);
      from += n;
    });
    return last;
  }
  const Lock held = lock();
  Stream& member = *members_.at(number);
  member.checkUsable();
  const SegmentUse use{base, true};
  makeRoom(member, use, 0, held);
  bringToWrite(base, member, held);
  const uint64_t sequence = member.post(wire::Load{base + offset, bytes, reader, from}, held);
  wrote(base, member, sequence, held);
  member.traffic(held).bytes_node += bytes;
  return sequence;
}

// --- within the lease

void Session::copyAcross(Address to_base, uint64_t to_offset, Address from_base,
                         uint64_t from_offset, uint64_t bytes) {
  if (bytes == 0) return;
  Stream::noteLine();
  if (anyWide() && extents(from_base) != nullptr) {
    return eachExtent(from_base, from_offset, bytes, [&](Address extent, uint64_t at, uint64_t n) {
      copyAcross(to_base, to_offset, extent, at, n);
      to_offset += n;
    });
  }
  if (anyWide() && extents(to_base) != nullptr) {
    return eachExtent(to_base, to_offset, bytes, [&](Address extent, uint64_t at, uint64_t n) {
      copyAcross(extent, at, from_base, from_offset, n);
      from_offset += n;
    });
  }
  const Lock held = lock();
  Stream& from = homeOrPlace(from_base, held);
  if (home(to_base, held) == nullptr) {  // beside its source, if there is room
    const SegmentUse uses[] = {{from_base, false}, {to_base, true}};
    Stream& member = place(uses, deviceOf(to_base, held), 0, held);
    makeRoom(member, uses, 0, held);
    bring(to_base, member, held);
  }
  Stream& to = homeOrPlace(to_base, held);
  bringToWrite(to_base, to, held);
  bring(from_base, from, held);
  uint64_t sequence;
  if (&to == &from) {
    sequence = to.post(wire::CopyWithin{to_base + to_offset, from_base + from_offset, bytes}, held);
  } else {
    sequence = postFetch(to, to_base + to_offset, from, from_base, from_offset, bytes, held);
  }
  wrote(to_base, to, sequence, held);
}

bool Session::addAcross(Address to_base, uint64_t to_offset, Address from_base,
                        uint64_t from_offset, uint64_t bytes, at::ScalarType type) {
  if (anyWide() && (extents(from_base) != nullptr || extents(to_base) != nullptr)) return false;
  Stream::noteLine();
  const Lock held = lock();
  Stream* from = home(from_base, held);
  Stream* to = home(to_base, held);
  if (from == nullptr || to == nullptr || from == to || !to->options().is_cpu ||
      !from->options().is_cpu) {
    return false;
  }
  bringToWrite(to_base, *to, held);
  bring(from_base, *from, held);
  const uint64_t reading = to->nextSequence(held);
  const uint64_t exported = from->post(wire::Export{from_base, to->member(), reading}, held);
  const uint64_t sequence = to->post(wire::FetchAdd{.fetch = {.to = to_base + to_offset,
                                                              .from = from_base + from_offset,
                                                              .bytes = bytes,
                                                              .peer = from->member(),
                                                              .written = at(from_base).written_at,
                                                              .exported = exported},
                                                    .dtype = static_cast<uint8_t>(type)},
                                     held);
  to->traffic(held).bytes_peer += bytes;
  wrote(to_base, *to, sequence, held);
  return true;
}

}  // namespace shoal::client
