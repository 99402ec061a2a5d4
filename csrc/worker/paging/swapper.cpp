#include "worker/paging/swapper.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

#include "base/byte_units.h"
#include "base/clock.h"
#include "transport/ring.h"
#include "wire/cursor.h"

namespace shoal::worker {
namespace {

constexpr uint64_t kSegmentBytesMin = 16 * 1024;  // smaller ones stay: moving them frees nothing

Segment* asSegment(PagedSegment* segment) {
  return static_cast<Segment*>(segment);
}

// Its bytes are in swap space only.
bool isAway(const Segment& segment) {
  return segment.bytes > 0 && segment.swap && !segment.dropped &&
         segment.storage.unsafeGetStorageImpl() != nullptr && segment.storage.data() == nullptr;
}

std::byte* dataOf(const Segment& segment) {
  return static_cast<std::byte*>(segment.storage.mutable_data());
}

}  // namespace

Swapper::~Swapper() {
  for (const PagedSegment* segment : policy_.resident()) {
    if (segment->in_place) arena_.charge(-static_cast<int64_t>(segment->bytes));
  }
}

void Swapper::lookAhead(const transport::RingConsumer& requests,
                        Lookahead::AddressWords address_words) {
  lookahead_ = std::make_unique<Lookahead>(requests, std::move(address_words));
  policy_.setUpcoming(&lookahead_->uses());
}

// --- segments come and go

void Swapper::bound(Segment& segment) {
  segment.used_at = policy_.now();
  if (segment.bytes >= kSegmentBytesMin) policy_.enter(segment);
}

void Swapper::adopted(Segment& segment, std::byte* data) {
  shared(segment);
  segment.swap = SwapBlock{SwapBlock::Tier::kAdopted, 0, data};
  policy_.enter(segment);
}

void Swapper::shared(Segment& segment) {
  segment.used_at = policy_.now();
  segment.in_place = true;
  arena_.charge(static_cast<int64_t>(segment.bytes));
}

void Swapper::freed(Segment& segment) {
  if (segment.incoming != nullptr) {
    copier_->cancel(*segment.incoming);
    --incoming_;
  }
  if (segment.outgoing != nullptr) dropCopyOut(segment);
  if (segment.swap) swap_.release(*segment.swap);
  if (segment.in_place) arena_.charge(-static_cast<int64_t>(segment.bytes));
  if (isAway(segment)) moveAway(segment, /*out=*/false);
  policy_.forget(segment);
  static_cast<PagedSegment&>(segment) = {.bytes = segment.bytes, .slot = segment.slot};
  segment.swap.reset();
  segment.incoming = segment.outgoing = nullptr;
  segment.dropped = false;
}

// --- into the device

void Swapper::use(Segment& segment, bool writes) {
  policy_.use(segment);
  if (segment.storage.data() == nullptr && segment.bytes > 0) bringIn(segment, /*ahead=*/false);
  if (segment.incoming != nullptr) {
    if (copier_->done(*segment.incoming)) counters_.prefetched_bytes += segment.bytes;
    counters_.stall_ns += copier_->wait(*segment.incoming);
    arrived(segment);
  }
  if (!writes) return;
  if (segment.outgoing != nullptr) dropCopyOut(segment);
  segment.copied = false;
}

c10::Storage Swapper::allocate(uint64_t bytes) {
  auto* allocator = static_cast<c10::Allocator*>(&arena_);
  return {c10::Storage::use_byte_size_t(), bytes, allocator->allocate(bytes), allocator,
          /*resizable=*/true};
}

void Swapper::bringIn(Segment& segment, bool ahead) {
  if (segment.dropped) {
    throw wire::ProtocolError("a message uses a segment after the message that frees it");
  }
  if (!segment.swap) refuseLost(segment);
  c10::Storage storage;
  try {
    storage = allocate(segment.bytes);
  } catch (const c10::OutOfMemoryError&) {
    const bool adopted = segment.swap->tier == SwapBlock::Tier::kAdopted;
    if (ahead || adopted || exchange_ != nullptr) throw;
    return exchange(segment);
  }
  auto* data = static_cast<std::byte*>(storage.mutable_data());
  if (ahead) {
    segment.incoming =
        std::make_shared<CopyJob>(CopyJob{*segment.swap, data, segment.bytes, /*out=*/false});
    copier_->submit(segment.incoming);
    ++incoming_;
  } else {
    const int64_t start = nowNs();
    swap_.read(*segment.swap, 0, data, segment.bytes);
    counters_.stall_ns += nowNs() - start;
  }
  count(*segment.swap, static_cast<int64_t>(segment.bytes), /*out=*/false);
  moveAway(segment, /*out=*/false);
  segment.storage = std::move(storage);
  segment.copied = true;
  policy_.enter(segment);
  if (!ahead) locations_.publish(segment);
}

// The device and swap space are both full: the segments that leave take the swap space of the one
// that comes.
void Swapper::exchange(Segment& segment) {
  std::vector<std::byte> aside(segment.bytes);
  swap_.read(*segment.swap, 0, aside.data(), segment.bytes);
  count(*segment.swap, static_cast<int64_t>(segment.bytes), /*out=*/false);
  Exchange exchange;
  exchange_ = &exchange;
  const auto end = c10::make_scope_exit([this] { exchange_ = nullptr; });
  swap_.release(*segment.swap);
  segment.swap.reset();
  c10::Storage storage;
  try {
    storage = allocate(segment.bytes);
  } catch (...) {  // there is no room after all, or a copy or a peer failed
    putBack(segment, aside);
    throw;
  }
  std::copy(aside.begin(), aside.end(), static_cast<std::byte*>(storage.mutable_data()));
  moveAway(segment, /*out=*/false);
  segment.storage = std::move(storage);
  segment.copied = false;
  policy_.enter(segment);
  locations_.publish(segment);
}

// An exchange failed. `segment` needs its swap space again: segments that left for the exchange
// come back to the device until there is enough.
void Swapper::putBack(Segment& segment, const std::vector<std::byte>& aside) {
  exchange_->failed = true;
  try {
    segment.swap = swap_.allocate(segment.bytes);
    for (size_t i = 0; !segment.swap && i < exchange_->left.size(); ++i) {
      Segment& other = *exchange_->left[i];
      bringIn(other, /*ahead=*/false);
      swap_.release(*other.swap);
      other.swap.reset();
      other.copied = false;
      segment.swap = swap_.allocate(segment.bytes);
    }
    if (segment.swap) return swap_.write(*segment.swap, 0, aside.data(), segment.bytes);
  } catch (const c10::Error&) {
    if (segment.swap) swap_.release(*segment.swap);
    segment.swap.reset();
  }
  moveAway(segment, /*out=*/false);
  policy_.forget(segment);
  refuseLost(segment);
}

// The disk failed, or other programs filled it, while the only copy of a segment was in memory.
void Swapper::refuseLost(const Segment& segment) {
  TORCH_CHECK_WITH(OutOfMemoryError, false, "a tensor of ", memory::readable(segment.bytes),
                   " is lost. The device was full, and its spill directory did not take the ",
                   "tensor back. Free space there, or start the pool with $SHOAL_SPILL_DIR set to ",
                   "a directory that can be written.");
}

void Swapper::arrived(Segment& segment) {
  const std::shared_ptr<CopyJob> job = std::exchange(segment.incoming, nullptr);
  --incoming_;
  if (job->error != nullptr) {
    vacate(segment);  // swap space still has it
    std::rethrow_exception(job->error);
  }
  locations_.publish(segment);
}

// --- out of the device

bool Swapper::canLeave(Segment& segment) const {
  if (segment.storage.use_count() != 1 || segment.incoming != nullptr) return false;
  if (!segment.readers.empty()) segment.forgetReaders(*peers_);
  return segment.readers.empty();
}

// Segments of `refused_bytes` or more leave only if they need no room in swap space.
Segment* Swapper::victim(double further_than, uint64_t refused_bytes) const {
  return asSegment(policy_.victim(further_than, [&](PagedSegment& paged) {
    auto& segment = static_cast<Segment&>(paged);
    return canLeave(segment) && (segment.bytes < refused_bytes || !needsSwap(segment));
  }));
}

bool Swapper::needsSwap(const Segment& segment) const {
  return !segment.swap && !segment.in_place && !policy_.isDead(segment);
}

bool Swapper::evict(Segment& segment) {
  if (segment.in_place) {
    // The host block is host memory: leaving the device moves nothing.
    arena_.charge(-static_cast<int64_t>(segment.bytes));
    segment.in_place = false;
    segment.copied = true;
    counters_.dropped_bytes += segment.bytes;
  } else if (policy_.isDead(segment)) {
    if (segment.outgoing != nullptr) dropCopyOut(segment);
    counters_.dropped_bytes += segment.bytes;
    segment.dropped = true;
  } else if (segment.outgoing != nullptr && copiedOut(segment)) {
    // The copier has done it.
  } else if (segment.copied) {
    counters_.dropped_bytes += segment.bytes;
  } else if (!copyOut(segment, /*ahead=*/false)) {
    return false;
  }
  vacate(segment);
  reserve_full_ = false;
  return true;
}

// Copies a segment to swap space, now or by the copier. Returns false if there is no room.
bool Swapper::copyOut(Segment& segment, bool ahead) {
  if (!segment.swap) segment.swap = swap_.allocate(segment.bytes);
  if (!segment.swap && !ahead && takeBackCopies(segment.bytes)) {
    segment.swap = swap_.allocate(segment.bytes);
  }
  if (!segment.swap) return false;
  std::byte* data = dataOf(segment);
  if (ahead) {
    segment.outgoing =
        std::make_shared<CopyJob>(CopyJob{*segment.swap, data, segment.bytes, /*out=*/true});
    copier_->submit(segment.outgoing);
  } else {
    const int64_t start = nowNs();
    swap_.write(*segment.swap, 0, data, segment.bytes);
    counters_.stall_ns += nowNs() - start;
  }
  count(*segment.swap, static_cast<int64_t>(segment.bytes), /*out=*/true);
  segment.copied = true;
  return true;
}

// Releases the swap space of unchanged segments: changed ones need it more.
bool Swapper::takeBackCopies(uint64_t bytes) {
  uint64_t taken = 0;
  for (PagedSegment* paged : policy_.resident()) {
    Segment& segment = *asSegment(paged);
    if (!segment.swap || segment.swap->tier == SwapBlock::Tier::kAdopted ||
        segment.incoming != nullptr || segment.outgoing != nullptr) {
      continue;
    }
    swap_.release(*segment.swap);
    segment.swap.reset();
    segment.copied = false;
    taken += segment.bytes;
    if (taken >= bytes) return true;
  }
  return taken > 0;
}

// Waits for the copier. Returns false if it could not write; then the segment has no copy.
bool Swapper::copiedOut(Segment& segment) {
  const std::shared_ptr<CopyJob> job = std::exchange(segment.outgoing, nullptr);
  counters_.stall_ns += copier_->wait(*job);
  if (job->error == nullptr) return true;
  swap_.release(*segment.swap);
  segment.swap.reset();
  segment.copied = false;
  return false;
}

void Swapper::dropCopyOut(Segment& segment) {
  const auto copied = static_cast<int64_t>(copier_->cancel(*segment.outgoing));
  count(*segment.swap, copied - static_cast<int64_t>(segment.bytes), /*out=*/true);
  segment.outgoing = nullptr;
  segment.copied = false;
}

// The segment is in swap space only.
void Swapper::vacate(Segment& segment) {
  segment.storage =
      c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(), nullptr, false);
  policy_.leave(segment);
  locations_.publish(segment);
  if (!segment.dropped) moveAway(segment, /*out=*/true);
}

void Swapper::moveAway(const Segment& segment, bool out) {
  if (Grant* grant = arena_.grant()) {
    grant->moveAway(out ? static_cast<int64_t>(segment.bytes)
                        : -static_cast<int64_t>(segment.bytes));
  }
}

// Waits for all prefetched segments: one of them may have to leave again. Returns false if there
// are none.
bool Swapper::awaitIncoming() {
  std::vector<Segment*> coming;
  for (PagedSegment* segment : policy_.resident()) {
    if (asSegment(segment)->incoming != nullptr) coming.push_back(asSegment(segment));
  }
  for (Segment* segment : coming) {
    counters_.stall_ns += copier_->wait(*segment->incoming);
    arrived(*segment);
  }
  return !coming.empty();
}

// Waits until peers have read what they read. They wait for no later message of this device.
bool Swapper::awaitReaders() {
  bool waited = false;
  for (PagedSegment* segment : policy_.resident()) {
    if (asSegment(segment)->readers.empty() || segment->used_at >= policy_.now()) continue;
    asSegment(segment)->awaitReaders(*peers_);
    waited = true;
  }
  return waited;
}

bool Swapper::reclaim(uint64_t bytes) {
  if (exchange_ != nullptr && exchange_->failed) return false;  // what left is coming back
  if (copier_ == nullptr && !policy_.onDemand()) copier_ = std::make_unique<Copier>(swap_);
  if (lookahead_ != nullptr) lookahead_->advance(policy_.now());
  bool freed = false;
  uint64_t refused_bytes = UINT64_MAX;  // swap space has no room for so many; it may for fewer
  for (uint64_t got = 0; got < bytes;) {
    Segment* segment = victim(-1.0, refused_bytes);
    if (segment == nullptr && awaitIncoming()) segment = victim(-1.0, refused_bytes);
    if (segment == nullptr && awaitReaders()) segment = victim(-1.0, refused_bytes);
    if (segment == nullptr) break;
    if (!evict(*segment)) {
      refused_bytes = segment->bytes;
      continue;
    }
    got += segment->bytes;
    freed = true;
    const bool in_swap = !segment->dropped && segment->swap->tier != SwapBlock::Tier::kAdopted;
    if (exchange_ != nullptr && in_swap) exchange_->left.push_back(segment);
  }
  return freed;
}

// --- ahead of the device

void Swapper::between() {
  if (copier_ == nullptr || lookahead_ == nullptr) return;
  lookahead_->advance(policy_.now());
  try {
    prefetch();
    if (!reserve_full_) fillReserve();
  } catch (const c10::Error&) {
    // Swap space cannot be written. The allocation that needs the room will report it.
    reserve_full_ = true;
  }
}

void Swapper::fillReserve() {
  if (copier_->waiting() > 0) return;
  PagedSegment* next = policy_.nextCopy(arena_.roomBytes(), [this](PagedSegment& segment) {
    return canLeave(static_cast<Segment&>(segment));
  });
  reserve_full_ = next == nullptr || !copyOut(*asSegment(next), /*ahead=*/true);
}

void Swapper::prefetch() {
  while (incoming_ < EvictionPolicy::kIncomingMax) {
    const auto wanted = policy_.nextPrefetch();
    if (wanted.segment == nullptr) return;
    if (!makeRoomAhead(wanted.segment->bytes, wanted.further_than)) return;
    bringIn(*asSegment(wanted.segment), /*ahead=*/true);
  }
}

// Makes room for a prefetch without waiting. Returns false if that is not possible yet.
bool Swapper::makeRoomAhead(uint64_t bytes, double further_than) {
  while (arena_.roomBytes() < bytes) {
    Segment* last = victim(further_than);
    if (last == nullptr) return false;
    if (last->outgoing != nullptr && !copier_->done(*last->outgoing)) return false;
    if (!last->copied && !last->in_place && !policy_.isDead(*last)) {
      copyOut(*last, /*ahead=*/true);
      return false;
    }
    if (!evict(*last)) return false;
  }
  return true;
}

void Swapper::count(const SwapBlock& block, int64_t bytes, bool out) {
  const auto change = static_cast<uint64_t>(bytes);  // modulo 2^64 where a count is taken back
  (out ? counters_.out_bytes : counters_.in_bytes) += change;
  if (block.tier == SwapBlock::Tier::kDisk) counters_.disk_bytes += change;
}

}  // namespace shoal::worker
