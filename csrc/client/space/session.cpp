#include "client/space/session.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "base/byte_units.h"
#include "client/member/devices.h"
#include "client/member/errors.h"
#include "client/member/interrupts.h"
#include "client/replay/recording.h"
#include "client/space/host_memory.h"

namespace shoal::client {

using wire::Address;

namespace {

constexpr uint64_t kPromptFreeBytes = uint64_t{1} << 20;
constexpr uint64_t kSlackPart = 16;  // of a member's memory, freed beyond what is needed at once
// A byte that has no room costs as much as this many that have to be fetched: it displaces another,
// which has to come back.
constexpr uint64_t kShortageCost = 4;
constexpr int kNowhereShift = 16;  // a byte that does not even fit in its swap space costs the most

}  // namespace

Stream& Session::add(StreamOptions options) {
  TORCH_CHECK(members_.size() < kMembersMax, "a lease has at most ", kMembersMax, " devices");
  memory_.limit_bytes += options.memory_bytes + options.spill_bytes;
  memory_.memory_bytes += options.memory_bytes;
  largest_memory_ = std::max(largest_memory_, options.memory_bytes);
  // One device alone, with nowhere to put anything aside, gains nothing by parts.
  if (!members_.empty() || options.spill_bytes > 0) whole_bytes_max_ = largest_memory_ / 2;
  const auto number = static_cast<uint32_t>(members_.size());
  members_.push_back(std::make_unique<Stream>(std::move(options), *this, number));
  used_bytes_.push_back(0);
  pinned_bytes_.push_back(0);
  return *members_.back();
}

// --- addresses

void Session::checkRoom(uint64_t bytes, c10::DeviceIndex index, const Lock&) const {
  if (memory_.allocated_bytes + bytes > memory_.limit_bytes) raiseOutOfMemory(bytes, index);
  if (index > 0 && !single()) {
    const auto member = static_cast<size_t>(index) - 1;
    if (pinned_bytes_[member] + bytes > limitOf(*members_[member])) {
      raiseOutOfMemory(bytes, index);
    }
  }
}

void Session::raiseOutOfMemory(uint64_t bytes, c10::DeviceIndex index) const {
  using memory::readable;
  const bool whole = index == 0 || single();
  const auto member = whole ? 0 : static_cast<size_t>(index) - 1;
  const StreamOptions& options = members_[member]->options();
  const uint64_t used = whole ? memory_.allocated_bytes : pinned_bytes_[member];
  const uint64_t limit = whole ? memory_.limit_bytes : limitOf(*members_[member]);
  const uint64_t on_device = whole ? memory_.memory_bytes : options.memory_bytes;
  // Libraries that retry with a smaller batch look for " out of memory." with its full stop.
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "shoal:", static_cast<int>(index), " (",
      whole && !single() ? "all " + std::to_string(size()) + " devices of the lease" : options.name,
      ") is out of memory. Tried to allocate ", readable(bytes), "; ", readable(used), " of ",
      readable(limit), " are in use (", readable(on_device), " of device memory and ",
      readable(limit - on_device), " of swap space). Free tensors, use a smaller batch, or lease ",
      "more with shoal.connect(devices=N) or shoal.connect(memory=\"8GiB\").");
  __builtin_unreachable();
}

Address Session::mint(uint64_t bytes, c10::DeviceIndex index) {
  const Lock held = lock();
  return mint(bytes, index, held);
}

Address Session::mint(uint64_t bytes, c10::DeviceIndex index, const Lock& held) {
  deviceMember(index).checkUsable();
  checkRoom(bytes, index, held);
  const uint32_t slot = takeSlots(wire::slotsFor(bytes));
  Segment& segment = segments_[slot];
  segment = Segment();
  segment.bytes = bytes;
  segment.live = true;
  segment.pinned = static_cast<int8_t>(index - 1);
  if (index > 0) pinned_bytes_[static_cast<size_t>(index) - 1] += bytes;
  memory_.allocated_bytes += bytes;
  memory_.peak_bytes = std::max(memory_.peak_bytes, memory_.allocated_bytes);
  ++memory_.allocations;
  live_segments_.fetch_add(1, std::memory_order_relaxed);
  const Address address = wire::makeAddress(number_, slot);
  if (Recording* recording = Recording::current()) recording->minted(address, bytes, index);
  return address;
}

uint32_t Session::takeSlots(uint64_t count) {
  auto& free = count == 1 ? free_slots_ : free_runs_[count];
  if (!free.empty()) {
    const uint32_t slot = free.back();
    free.pop_back();
    return slot;
  }
  TORCH_CHECK(next_slot_ + count <= wire::kSlotsMax, "shoal: more than ", wire::kSlotsMax,
              " tensors are alive in one lease");
  const uint32_t slot = next_slot_;
  next_slot_ += static_cast<uint32_t>(count);
  if (segments_.size() < next_slot_) {
    segments_.resize(std::max<size_t>(next_slot_, segments_.size() * 2));
  }
  return slot;
}

void Session::giveSlots(uint32_t slot, uint64_t count) {
  (count == 1 ? free_slots_ : free_runs_[count]).push_back(slot);
}

void Session::release(Address address) noexcept {
  bool last = false;
  {
    const Lock held = lock();
    releaseLocked(address, held);
    last = live_segments_.load() == 0 && !usable();
  }
  if (last) Devices::get().sweep();
}

void Session::releaseLocked(Address address, const Lock& held) noexcept {
  if (wide_.count(wire::slotOf(address)) > 0) return releaseWide(address, held);
  if (recording_ != nullptr) recording_->released(address);
  Segment& segment = at(address);
  if (segment.owes || segment.owed_from != 0) endDebts(address, held);
  if (tracing_ && segment.home >= 0) {
    ++traced_calls_;
    trace(Access::kFree, address, static_cast<uint32_t>(segment.home));
  }
  memory_.allocated_bytes -= segment.bytes;
  if (segment.pinned >= 0) pinned_bytes_[static_cast<size_t>(segment.pinned)] -= segment.bytes;
  ++memory_.frees;
  for (auto& member : members_) {
    if ((segment.bound & member->bit()) == 0) continue;
    try {
      dropCopy(address, segment, *member, held);
    } catch (...) {
      // The worker is gone, and its memory with it. The next call says so.
    }
  }
  const uint64_t count = wire::slotsFor(segment.bytes);
  segment = Segment();
  giveSlots(wire::slotOf(address), count);
  live_segments_.fetch_sub(1);
}

// --- where things are

Stream* Session::home(Address base, const Lock&) {
  Segment& segment = at(base);
  if (segment.home < 0) return nullptr;
  promote(segment);
  return members_[static_cast<size_t>(segment.home)].get();
}

// Where the home of a segment is lost, a copy of it elsewhere takes its place.
void Session::promote(Segment& segment) {
  if (members_[static_cast<size_t>(segment.home)]->usable()) return;
  for (auto& member : members_) {
    if (member->usable() && (segment.valid & member->bit()) != 0) return moveHome(segment, *member);
  }
}

uint64_t Session::roomOf(const Stream& member) const {
  const uint64_t used = used_bytes_[member.member()];
  const uint64_t limit = member.options().memory_bytes;
  return used < limit ? limit - used : 0;
}

uint64_t Session::leftOf(const Stream& member) const {
  const uint64_t used = used_bytes_[member.member()];
  return used < limitOf(member) ? limitOf(member) - used : 0;
}

Stream& Session::place(c10::ArrayRef<SegmentUse> uses, c10::DeviceIndex index, uint64_t made_bytes,
                       const Lock&) {
  if (single() || index > 0) return deviceMember(index);
  ++calls_;
  uint64_t largest = 0;
  size_t preferred = 0;
  int shared = -1;
  for (const SegmentUse& use : uses) {
    Segment& segment = at(use.base);
    segment.used_at = calls_;
    if (segment.shared) shared = segment.home;
    if (segment.home >= 0 && segment.bytes > largest) {
      largest = segment.bytes;
      preferred = static_cast<size_t>(segment.home);
    }
  }
  if (shared >= 0) return *members_[static_cast<size_t>(shared)];
  Stream* best = nullptr;
  uint64_t least = UINT64_MAX;
  for (size_t i = 0; i <= size(); ++i) {  // the preferred one first: it wins where all are equal
    Stream& member = *members_[i == 0 ? preferred : i - 1];
    if (!member.usable()) continue;
    uint64_t missing = 0;
    uint64_t unbound = 0;
    for (const SegmentUse& use : uses) {
      const Segment& segment = at(use.base);
      if (segment.bound == 0) {
        unbound += segment.bytes;
      } else if ((segment.valid & member.bit()) == 0) {
        missing += segment.bytes;
      }
    }
    const uint64_t needed = missing + unbound + made_bytes;
    const uint64_t room = roomOf(member);
    uint64_t cost = missing + (needed > room ? (needed - room) * kShortageCost : 0);
    const uint64_t left = leftOf(member);
    if (needed > left) cost += (needed - left) << kNowhereShift;
    if (cost < least || (cost == least && needed > room && left > leftOf(*best))) {
      least = cost;
      best = &member;
    }
  }
  if (best == nullptr) members_[0]->checkUsable();
  TORCH_CHECK(best != nullptr, "shoal: no device of the lease is left");
  return *best;
}

void Session::makeRoom(Stream& member, c10::ArrayRef<SegmentUse> uses, uint64_t made_bytes,
                       const Lock& held) {
  if (single()) return;
  uint64_t needed = made_bytes;
  for (const SegmentUse& use : uses) {
    const Segment& segment = at(use.base);
    if ((segment.bound & member.bit()) == 0) needed += segment.bytes;
  }
  if (needed <= roomOf(member)) return;
  const uint64_t goal = needed + member.options().memory_bytes / kSlackPart;
  dropReplicas(member, goal, held);
  if (roomOf(member) >= needed) return;
  bool asked = false;
  for (const uint32_t slot : leastUsed(member)) {
    if (roomOf(member) >= goal) return;
    Segment& segment = segments_[slot];
    if (segment.pinned >= 0 || segment.shared) continue;
    const Address base = wire::makeAddress(number_, slot);
    Stream* peer = emptiest(member, segment.bytes);
    if (peer == nullptr && !asked) {
      asked = true;
      for (auto& other : members_) dropReplicas(*other, UINT64_MAX, held);
      peer = emptiest(member, segment.bytes);
    }
    if (peer == nullptr) continue;
    if ((segment.valid & peer->bit()) == 0) fetch(base, segment, *peer, held);
    moveHome(segment, *peer);
    dropCopy(base, segment, member, held);
  }
}

// Copies whose original is elsewhere cost nothing to drop, until there is room for `goal` bytes.
void Session::dropReplicas(Stream& member, uint64_t goal, const Lock& held) {
  for (const uint32_t slot : leastUsed(member)) {
    if (roomOf(member) >= goal) return;
    Segment& segment = segments_[slot];
    if (segment.home != static_cast<int>(member.member())) {
      dropCopy(wire::makeAddress(number_, slot), segment, member, held);
    }
  }
}

// Segments on a member that the present call does not use, those first that were not used longest.
std::vector<uint32_t> Session::leastUsed(const Stream& member) const {
  std::vector<uint32_t> found;
  for (uint32_t slot = 1; slot < next_slot_; ++slot) {
    const Segment& segment = segments_[slot];
    if (segment.live && (segment.bound & member.bit()) != 0 && segment.used_at < calls_) {
      found.push_back(slot);
    }
  }
  std::sort(found.begin(), found.end(),
            [this](uint32_t a, uint32_t b) { return segments_[a].used_at < segments_[b].used_at; });
  return found;
}

Stream* Session::emptiest(const Stream& but, uint64_t bytes) const {
  Stream* best = nullptr;
  for (const auto& member : members_) {
    if (member.get() == &but || !member->usable() || roomOf(*member) < bytes) continue;
    if (best == nullptr || roomOf(*member) > roomOf(*best)) best = member.get();
  }
  return best;
}

void Session::moveHome(Segment& segment, Stream& member) {
  segment.home = static_cast<int8_t>(member.member());
  segment.written_at = member.lastSequence();  // by then at the latest
}

void Session::bringFrom(Address base, Segment& segment, Stream& member, const Lock& held) {
  TORCH_CHECK(segment.live,
              "shoal: an operator needs a tensor whole that is larger than any device");
  if (segment.shared) {
    raiseShareError("a shared tensor is used on shoal:" + std::to_string(segment.home + 1) +
                    " only. Make a copy for the other device: tensor.clone().to(device)");
  }
  if (segment.owed_from != 0) {
    collect(base, held);
    if ((segment.valid & member.bit()) != 0) return;
  }
  if (segment.bound == 0) {
    const uint64_t sequence = member.post(wire::Allocate{base, segment.bytes}, held);
    made(base, member, sequence, held);
  } else {
    fetch(base, segment, member, held);
  }
}

void Session::fetch(Address base, Segment& segment, Stream& to, const Lock& held) {
  promote(segment);
  Stream& from = *members_[static_cast<size_t>(segment.home)];
  from.checkUsable();
  postFetch(to, base, from, base, 0, segment.bytes, held);
  segment.bound |= to.bit();
  segment.valid |= to.bit();
  used_bytes_[to.member()] += segment.bytes;
}

// Copies a part of a segment on `from` to the address `target` on `to`.
uint64_t Session::postFetch(Stream& to, Address target, Stream& from, Address from_base,
                            uint64_t from_offset, uint64_t bytes, const Lock& held) {
  // The two messages name each other: each side knows how far the other must be.
  const uint64_t reading = to.nextSequence(held);
  const uint64_t exported = from.post(wire::Export{from_base, to.member(), reading}, held);
  to.traffic(held).bytes_peer += bytes;
  return to.post(wire::Fetch{.to = target,
                             .from = from_base + from_offset,
                             .bytes = bytes,
                             .peer = from.member(),
                             .written = at(from_base).written_at,
                             .exported = exported},
                 held);
}

void Session::made(Address base, Stream& member, uint64_t sequence, const Lock&) {
  Segment& segment = at(base);
  segment.bound = segment.valid = member.bit();
  segment.home = static_cast<int8_t>(member.member());
  segment.written_at = sequence;
  segment.used_at = calls_;
  used_bytes_[member.member()] += segment.bytes;
}

void Session::invalidate(Address base, Stream& member, uint64_t sequence, const Lock& held) {
  Segment& segment = at(base);
  if (segment.bound != member.bit()) {
    for (auto& other : members_) {
      if (other.get() != &member && (segment.bound & other->bit()) != 0) {
        dropCopy(base, segment, *other, held);
      }
    }
  }
  segment.home = static_cast<int8_t>(member.member());
  segment.written_at = sequence;
}

void Session::dropCopy(Address base, Segment& segment, Stream& member, const Lock& held) {
  segment.bound &= ~member.bit();
  segment.valid &= ~member.bit();
  used_bytes_[member.member()] -= segment.bytes;
  const bool in_host_block = segment.host_block != 0 && segment.host_member == member.member();
  if (member.usable()) {
    member.free(base, segment.bytes >= kPromptFreeBytes || in_host_block, held);
  }
  if (in_host_block) {
    // Only when every member is past the free, or past a read of the block, is it ours again.
    releaseHostLater(segment.host_block - 1, held);
    segment.host_block = 0;
  }
}

// --- generators

Stream& Session::generatorHome(uint64_t generator, const Lock&) {
  return *members_[generator_home_.try_emplace(generator, 0).first->second];
}

void Session::bringGenerator(uint64_t generator, Stream& member, const Lock& held) {
  Stream& from = generatorHome(generator, held);
  if (&from == &member) return;
  const Address state = mint(sizeof(wire::SavedGenerator), 0, held);
  const uint64_t saved = from.post(wire::GeneratorSave{generator, state}, held);
  made(state, from, saved, held);
  bring(state, member, held);
  member.post(wire::GeneratorLoad{generator, state}, held);
  releaseLocked(state, held);
  generator_home_[generator] = member.member();
}

// --- state

void Session::synchronize(c10::DeviceIndex index) {
  if (index > 0 || single()) return deviceMember(index).synchronize();
  Stream::noteLine();
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

bool Session::idle(c10::DeviceIndex index) {
  const auto idle = [](Stream& member) {
    if (!member.idle()) member.checkSometimes();  // who asks in a loop is told of a loss
    return member.idle() && member.devicePast(0);
  };
  if (index > 0 || single()) return idle(deviceMember(index));
  return std::all_of(members_.begin(), members_.end(), [&](const auto& m) { return idle(*m); });
}

void Session::raiseFailureOfOthers(const Stream& than) {
  for (auto& member : members_) {
    if (member.get() != &than) member->synchronize();
  }
}

Session::~Session() {
  if (host_releases_.empty()) return;
  std::vector<uint64_t> offsets;
  for (const HostRelease& release : host_releases_) offsets.push_back(release.offset);
  std::vector<memory::SharedMemory> workers;
  for (auto& member : members_) {
    if (member->link() == nullptr) workers.push_back(member->takeProgress());
  }
  HostMemory::get().releaseAfter(std::move(offsets), std::move(workers));
}

void Session::close() noexcept {
  for (auto& member : members_) member->close();
}

void Session::abandon() noexcept {
  for (auto& member : members_) member->abandon();
}

bool Session::usable() const {
  return std::any_of(members_.begin(), members_.end(), [](const auto& m) { return m->usable(); });
}

MemoryUse Session::memoryUse(c10::DeviceIndex index) {
  const Lock held = lock();
  if (index == 0 || single()) return memory_;
  MemoryUse use = memory_;
  const auto member = static_cast<size_t>(index) - 1;
  use.allocated_bytes = use.peak_bytes = used_bytes_[member];
  use.limit_bytes = limitOf(*members_[member]);
  use.memory_bytes = members_[member]->options().memory_bytes;
  return use;
}

void Session::resetPeak() {
  const Lock held = lock();
  memory_.peak_bytes = memory_.allocated_bytes;
}

Traffic Session::traffic(c10::DeviceIndex index) {
  const Lock held = lock();
  Traffic sum;
  for (auto& member : members_) {
    if (index > 0 && member->member() + 1 != static_cast<uint32_t>(index)) continue;
    const Traffic& t = member->traffic(held);
    sum.messages += t.messages;
    sum.stream_bytes += t.stream_bytes;
    sum.bytes_in += t.bytes_in;
    sum.bytes_out += t.bytes_out;
    sum.bytes_copied += t.bytes_copied;
    sum.bytes_peer += t.bytes_peer;
    sum.bytes_node += t.bytes_node;
    sum.round_trips += t.round_trips;
  }
  return sum;
}

void Session::startTrace() {
  const Lock held = lock();
  trace_.clear();
  tracing_ = true;
}

std::vector<Session::TraceEvent> Session::stopTrace() {
  const Lock held = lock();
  tracing_ = false;
  return std::exchange(trace_, {});
}

void Session::trim() {
  for (auto& member : members_) member->post(wire::Trim{});
}

std::vector<Session::Entry> Session::map() {
  const Lock held = lock();
  std::vector<Entry> entries;
  for (uint32_t slot = 1; slot < next_slot_; ++slot) {
    const Segment& segment = segments_[slot];
    if (!segment.live) continue;
    uint32_t resident = 0;
    int64_t frame = -1;
    for (const auto& member : members_) {
      // What a machine elsewhere swapped out, it does not say.
      const bool near = member->link() == nullptr;
      const uint64_t word = near ? member->places().word(slot) : 0;
      const bool here =
          near ? transport::Places::present(word) : (segment.bound & member->bit()) != 0;
      if (here) resident |= member->bit();
      if (near && here && segment.home == static_cast<int>(member->member()) &&
          !transport::Places::inHost(word)) {
        frame = static_cast<int64_t>(transport::Places::offset(word));
      }
    }
    if (segment.shared) resident |= segment.bound;  // it never leaves
    entries.push_back({wire::makeAddress(number_, slot), segment.bytes, segment.bound,
                       segment.valid, resident, segment.home, segment.pinned, segment.part_of,
                       segment.written_at, frame, segment.shared});
  }
  return entries;
}

}  // namespace shoal::client
