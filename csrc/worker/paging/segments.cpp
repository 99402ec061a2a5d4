#include "worker/paging/segments.h"

#include <algorithm>
#include <cstdio>

#include "memory/copy_bytes.h"
#include "wire/cursor.h"

namespace shoal::worker {
namespace {

constexpr uint64_t kKeptPart = 8;  // freed memory may wait for copies: this part of the lease's

std::string hex(wire::Address address) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(address));
  return text;
}

// The memory that peers map.
const memory::SharedMemory* mappedBy(const SegmentsOptions& options) {
  if (options.arena != nullptr) return &options.arena->region();
  return options.shown == nullptr ? nullptr : &options.shown->region();
}

}  // namespace

Segments::Segments(const SegmentsOptions& options)
    : session_(options.session),
      late_(options.late),
      arena_(options.arena),
      shown_(options.shown),
      peers_(options.peers),
      limit_bytes_(options.policy.limit_bytes),
      locations_(options.locations, mappedBy(options), options.host),
      policy_(options.policy) {
  if (arena_ == nullptr) return;
  swapper_ = std::make_unique<Swapper>(options.swap, *arena_, policy_, locations_, peers_);
  arena_->setReclaimer(this);
}

Segments::~Segments() {
  if (arena_ != nullptr) arena_->setReclaimer(nullptr);
}

bool Segments::reclaim(uint64_t bytes) {
  return dropFreed(/*wait=*/true) || swapper_->reclaim(bytes);
}

// No message runs, so the segments of the last one may leave too.
void Segments::shrink(uint64_t bytes) {
  if (swapper_ == nullptr) return;
  policy_.setNow(policy_.now() + 1);
  dropFreed(/*wait=*/false);
  swapper_->reclaim(bytes);
}

Segment& Segments::at(wire::Address address, uint64_t bytes) {
  const uint32_t slot = wire::slotOf(address);
  const uint64_t count = wire::slotsFor(bytes);
  if (wire::sessionOf(address) != session_ || slot == 0 || address % wire::kSlotBytes != 0 ||
      count > wire::kSlotsMax - slot) {
    throw wire::ProtocolError("address " + hex(address) + " cannot start a segment of " +
                              std::to_string(bytes) + " bytes in this session");
  }
  if (slots_.size() < slot + count)
    slots_.resize(std::max<size_t>(slot + count, slots_.size() * 2));
  auto& segment = slots_[slot].segment;
  if (segment == nullptr) segment = std::make_unique<Segment>();
  segment->slot = slot;
  if (!segment->bound && segment->poison == nullptr) ++count_;
  for (uint32_t i = 1; i < count; ++i) slots_[slot + i].back = i;
  return *segment;
}

void Segments::bind(wire::Address address, c10::Storage storage, uint64_t bytes) {
  Segment& segment = set(address, std::move(storage), bytes);
  if (swapper_ != nullptr) swapper_->bound(segment);
}

void Segments::adopt(wire::Address address, std::byte* data, uint64_t bytes) {
  // The client keeps the block until it has freed the segment, so nothing is released here.
  c10::DataPtr pointer(data, c10::Device(c10::DeviceType::CPU));
  Segment& segment = set(address,
                         c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(pointer),
                                      c10::GetAllocator(c10::DeviceType::CPU), /*resizable=*/true),
                         bytes);
  if (swapper_ != nullptr) swapper_->adopted(segment, data);
}

void Segments::share(wire::Address address, std::shared_ptr<SharedBlock> block, uint64_t bytes) {
  // The storage keeps the block alive. It cannot grow.
  auto* keeper = new std::shared_ptr<SharedBlock>(block);
  c10::DataPtr pointer(
      block->data(), keeper, [](void* p) { delete static_cast<std::shared_ptr<SharedBlock>*>(p); },
      c10::Device(c10::DeviceType::CPU));
  Segment& segment = set(address,
                         c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(pointer),
                                      /*allocator=*/nullptr, /*resizable=*/false),
                         bytes);
  segment.shared = std::move(block);
  shared_bytes_ += bytes;
  ++shared_count_;
  if (swapper_ != nullptr) swapper_->shared(segment);
}

c10::Storage Segments::unshared(wire::Address address) {
  const Place place = use(address, 0, /*writes=*/false);
  Segment& segment = *place.segment;
  if (segment.shared == nullptr || place.offset != 0) {
    throw wire::ProtocolError("address " + hex(address) + " is not a shared segment");
  }
  // Its bytes must not count twice while they are copied.
  if (swapper_ != nullptr) swapper_->freed(segment);
  try {
    return snapshot(segment);
  } catch (...) {
    if (swapper_ != nullptr) swapper_->shared(segment);
    throw;
  }
}

// Copies its bytes to memory of this session alone.
c10::Storage Segments::snapshot(const Segment& segment) const {
  c10::Allocator* allocator = c10::GetAllocator(c10::DeviceType::CPU);
  c10::Storage copy(c10::Storage::use_byte_size_t(), segment.bytes,
                    allocator->allocate(segment.bytes), allocator, /*resizable=*/true);
  memory::copyBytes(copy.mutable_data(), segment.storage.data(), segment.bytes);
  return copy;
}

// Copies its bytes to where peers see them.
c10::Storage Segments::shownCopy(Segment& segment) {
  if (shown_->isFull(segment.bytes)) dropFreed(/*wait=*/true);
  c10::Storage copy = shown_->allocate(segment.bytes);
  late_->copyOut(segment.uses, static_cast<std::byte*>(copy.mutable_data()),
                 static_cast<const std::byte*>(segment.storage.data()), segment.bytes);
  return copy;
}

void Segments::expect(wire::Address address) {
  if (address == 0 || swapper_ == nullptr) return;
  Segment& segment = *resolve(address, 0).segment;
  if (segment.bound) policy_.use(segment);
}

Place Segments::use(wire::Address address, uint64_t bytes, bool writes) {
  const Place place = useBeside(address, bytes, writes);
  if (late_ != nullptr && place.segment->poison == nullptr) {
    late_->lanes.compute(place.segment->uses, writes);
  }
  return place;
}

Place Segments::useBeside(wire::Address address, uint64_t bytes, bool writes) {
  const Place place = resolve(address, bytes);
  Segment& segment = *place.segment;
  if (segment.poison != nullptr) return place;
  if (segment.shared != nullptr) segment.shared->check(writes);
  if (swapper_ != nullptr) swapper_->use(segment, writes);
  if (writes && !segment.readers.empty()) segment.awaitReaders(*peers_);
  return place;
}

Segment& Segments::set(wire::Address address, c10::Storage storage, uint64_t bytes) {
  Segment& segment = at(address, bytes);
  bound_bytes_ += bytes - (segment.bound ? segment.bytes : 0);
  retire(segment);
  segment.storage = std::move(storage);
  segment.bytes = bytes;
  segment.bound = true;
  segment.poison = nullptr;
  if (late_ != nullptr) late_->lanes.made(segment.uses);
  locations_.publish(segment);
  return segment;
}

void Segments::poison(wire::Address address, std::shared_ptr<const Failure> failure) {
  Segment& segment = at(address, 0);
  if (segment.bound) bound_bytes_ -= segment.bytes;
  retire(segment);
  segment.storage = c10::Storage();
  segment.bound = false;  // `bytes` stays: it says which slots are freed with it
  segment.poison = std::move(failure);
  locations_.publish(segment);
}

void Segments::poisonAt(wire::Address address, std::shared_ptr<const Failure> failure) {
  const uint32_t slot = wire::slotOf(address);
  if (wire::sessionOf(address) != session_ || slot >= slots_.size()) return;
  const uint32_t start = slot - slots_[slot].back;
  const Segment* segment = slots_[start].segment.get();
  if (segment == nullptr || !segment->bound || segment->poison != nullptr) return;
  poison(wire::makeAddress(session_, start), std::move(failure));
}

void Segments::release(wire::Address address) {
  const uint32_t slot = wire::slotOf(address);
  if (wire::sessionOf(address) != session_ || slot >= slots_.size() ||
      address % wire::kSlotBytes != 0 || slots_[slot].segment == nullptr) {
    throw wire::ProtocolError("address " + hex(address) +
                              " cannot be freed: no segment starts there");
  }
  Segment& segment = *slots_[slot].segment;
  if (segment.bound) bound_bytes_ -= segment.bytes;
  if (segment.bound || segment.poison != nullptr) --count_;
  for (uint64_t i = 1; i < wire::slotsFor(segment.bytes); ++i) slots_[slot + i].back = 0;
  retire(segment);
  segment = Segment();
  segment.slot = slot;
  locations_.publish(segment);
}

// Whether the segment's memory must outlive it because copies run. If too much is kept already, the
// memory is free at once, and operators wait for the copies.
bool Segments::keepForCopies(const Segment& segment) {
  if (late_ == nullptr || !late_->lanes.copiesRun(segment.uses)) return false;
  if (kept_bytes_ + segment.bytes <= limit_bytes_ / kKeptPart) return true;
  late_->lanes.drop(segment.uses);
  return false;
}

// Takes a segment's memory away. Memory that a peer or a copy still uses outlives its segment.
void Segments::retire(Segment& segment) {
  if (swapper_ != nullptr) swapper_->freed(segment);
  if (segment.shared != nullptr) {
    shared_bytes_ -= segment.bytes;
    --shared_count_;
    segment.shared = nullptr;
  }
  const bool kept = segment.bound && keepForCopies(segment);
  if (kept) kept_bytes_ += segment.storage.nbytes();
  if (kept || !segment.readers.empty()) {
    freed_.push_back(
        {std::move(segment.storage), std::move(segment.readers), kept ? late_->lanes.now() : 0});
    segment.readers.clear();
  }
  if (!freed_.empty()) dropFreed(/*wait=*/false);
}

// Releases freed memory that nobody uses any more; with `wait`, it waits for peers. Returns whether
// there was any.
bool Segments::dropFreed(bool wait) {
  const size_t dropped = std::erase_if(freed_, [&](Freed& freed) {
    for (const PeerRead& reader : freed.readers) {
      if (wait) peers_->awaitRead(reader.peer, reader.sequence);
      if (!peers_->hasRead(reader.peer, reader.sequence)) return false;
    }
    if (freed.until == 0) return true;
    if (freed.until > late_->lanes.done()) return false;
    kept_bytes_ -= freed.storage.nbytes();
    return true;
  });
  return dropped > 0;
}

void Segments::addReader(wire::Address address, PeerRead reader, uint64_t exported) {
  if (noted_.empty()) noted_.resize(transport::kExportNotes, {0, 0});
  PeerRead& before = noted_[exported % transport::kExportNotes];
  peers_->awaitRead(before.peer, before.sequence);
  before = reader;
  const Place place = useBeside(address, 0, /*writes=*/false);
  const bool copies = shown_ != nullptr && place.segment->bound && place.segment->bytes > 0;
  if (copies || place.segment->shared != nullptr) {
    // Peers do not map this memory. They read a copy, which goes when they are done.
    c10::Storage copy = copies ? shownCopy(*place.segment) : snapshot(*place.segment);
    locations_.noteCopy(exported, copy);
    freed_.push_back({std::move(copy), {reader}, 0});
    return;
  }
  locations_.note(exported, *place.segment);
  if (place.segment->poison != nullptr) return;  // nothing to read: the reader will see that
  // Drop the old readers before adding one, so that the list stays as short as the lease.
  place.segment->forgetReaders(*peers_);
  place.segment->readers.push_back(reader);
}

Place Segments::resolve(wire::Address address, uint64_t bytes) {
  uint32_t slot = wire::slotOf(address);
  if (wire::sessionOf(address) == session_ && slot < slots_.size()) {
    const uint32_t start = slot - slots_[slot].back;
    Segment* segment = slots_[start].segment.get();
    if (segment != nullptr && segment->poison != nullptr) return {segment, 0};
    if (segment != nullptr && segment->bound) {
      const uint64_t offset = address - wire::makeAddress(session_, start);
      if (offset <= segment->bytes && bytes <= segment->bytes - offset) return {segment, offset};
      throw wire::ProtocolError("[" + hex(address) + ", +" + std::to_string(bytes) +
                                ") runs past the end of its segment of " +
                                std::to_string(segment->bytes) + " bytes");
    }
  }
  throw wire::ProtocolError("address " + hex(address) + " is not bound to memory in this session");
}

}  // namespace shoal::worker
