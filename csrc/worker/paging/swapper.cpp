#include "worker/paging/pager.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

#include "transport/ring.h"
#include "wire/cursor.h"
#include "worker/paging/segments.h"

namespace shoal::worker {
namespace {

constexpr uint64_t kSegmentBytesMin = 16 * 1024;  // smaller ones stay: moving them frees nothing
constexpr double kCleanFactor = 2.0;  // how much nearer a next use may be without a write
constexpr size_t kLookMax = 64;       // coming uses that are looked at for each message
// How early a segment may come. What makes room for it is away for so much longer: a loop of L
// messages moves L / (L - this) times the bytes.
constexpr uint64_t kPrefetchMessages = 6;
constexpr size_t kIncomingMax = 2;  // that are on their way in at once

}  // namespace

Pager::Pager(PagerOptions options, Arena& arena)
    : options_(std::move(options)), arena_(arena), swap_(options_.swap) {}

Pager::~Pager() {
  for (const Segment* segment : resident_) {
    if (segment->residency.in_place) arena_.charge(-static_cast<int64_t>(segment->bytes));
  }
}

// --- segments come and go

void Pager::add(Segment& segment, uint32_t slot) {
  segment.residency.slot = slot;
  segment.residency.number = static_cast<uint32_t>(resident_.size());
  resident_.push_back(&segment);
}

void Pager::remove(Segment& segment) {
  const uint32_t number = segment.residency.number;
  if (number == UINT32_MAX) return;
  resident_[number] = resident_.back();
  resident_[number]->residency.number = number;
  resident_.pop_back();
  segment.residency.number = UINT32_MAX;
}

void Pager::bound(Segment& segment, uint32_t slot) {
  segment.residency.used_at = now_;
  if (segment.bytes >= kSegmentBytesMin) add(segment, slot);
}

void Pager::adopted(Segment& segment, uint32_t slot, std::byte* data) {
  Residency& residency = segment.residency;
  residency.used_at = now_;
  residency.swap = SwapBlock{SwapBlock::Tier::kAdopted, 0, data};
  residency.in_place = true;
  arena_.charge(static_cast<int64_t>(segment.bytes));
  add(segment, slot);
}

void Pager::shared(Segment& segment, uint32_t slot) {
  Residency& residency = segment.residency;
  residency.used_at = now_;
  residency.slot = slot;
  residency.in_place = true;  // not among the resident ones, so never a victim
  arena_.charge(static_cast<int64_t>(segment.bytes));
}

void Pager::freed(Segment& segment) {
  Residency& residency = segment.residency;
  if (residency.incoming != nullptr) {
    copier_->cancel(*residency.incoming);
    --incoming_;
  }
  if (residency.outgoing != nullptr) dropCopyOut(segment);
  if (residency.swap) swap_.release(*residency.swap);
  if (residency.in_place) arena_.charge(-static_cast<int64_t>(segment.bytes));
  swapped_.erase(residency.slot);
  remove(segment);
  residency = Residency();
}

// --- into the device

void Pager::use(Segment& segment, uint64_t sequence, bool writes) {
  Residency& residency = segment.residency;
  expect(residency, sequence);
  if (segment.storage.data() == nullptr && segment.bytes > 0) bringIn(segment, /*ahead=*/false);
  if (residency.incoming != nullptr) {
    if (copier_->done(*residency.incoming)) counters_.prefetched_bytes += segment.bytes;
    counters_.stall_ns += copier_->wait(*residency.incoming);
    arrived(segment);
  }
  if (!writes) return;
  if (residency.outgoing != nullptr) dropCopyOut(segment);
  residency.dirty = true;
}

void Pager::bringIn(Segment& segment, bool ahead) {
  Residency& residency = segment.residency;
  if (residency.dropped) {
    throw wire::ProtocolError("a segment is used after the stream said that it is freed");
  }
  if (!residency.swap) refuseLost(segment);
  auto* allocator = static_cast<c10::Allocator*>(&arena_);
  c10::DataPtr memory;
  try {
    memory = allocator->allocate(segment.bytes);
  } catch (const c10::OutOfMemoryError&) {
    const bool adopted = residency.swap->tier == SwapBlock::Tier::kAdopted;
    if (ahead || adopted || exchange_ != nullptr) throw;
    return exchange(segment);
  }
  c10::Storage storage(c10::Storage::use_byte_size_t(), segment.bytes, std::move(memory), allocator,
                       /*resizable=*/true);
  auto* data = static_cast<std::byte*>(storage.mutable_data());
  if (ahead) {
    residency.incoming =
        std::make_shared<CopyJob>(CopyJob{*residency.swap, data, segment.bytes, /*out=*/false});
    copier_->submit(residency.incoming);
    ++incoming_;
  } else {
    const int64_t start = transport::nowNs();
    swap_.read(*residency.swap, 0, data, segment.bytes);
    counters_.stall_ns += transport::nowNs() - start;
  }
  count(*residency.swap, static_cast<int64_t>(segment.bytes), /*out=*/false);
  segment.storage = std::move(storage);
  residency.dirty = false;
  swapped_.erase(residency.slot);
  add(segment, residency.slot);
  if (!ahead) moved(segment);
}

// Device and swap space are both full: what leaves takes the place of what comes.
void Pager::exchange(Segment& segment) {
  Residency& residency = segment.residency;
  std::vector<std::byte> aside(segment.bytes);
  swap_.read(*residency.swap, 0, aside.data(), segment.bytes);
  count(*residency.swap, static_cast<int64_t>(segment.bytes), /*out=*/false);
  Exchange exchange;
  exchange_ = &exchange;
  const auto end = c10::make_scope_exit([this] { exchange_ = nullptr; });
  swap_.release(*residency.swap);
  residency.swap.reset();
  auto* allocator = static_cast<c10::Allocator*>(&arena_);
  c10::DataPtr memory;
  try {
    memory = allocator->allocate(segment.bytes);
  } catch (...) {  // no room after all, or a copy or a peer that failed
    putBack(segment, aside);
    throw;
  }
  std::copy(aside.begin(), aside.end(), static_cast<std::byte*>(memory.mutable_get()));
  segment.storage = c10::Storage(c10::Storage::use_byte_size_t(), segment.bytes, std::move(memory),
                                 allocator, /*resizable=*/true);
  residency.dirty = true;
  swapped_.erase(residency.slot);
  add(segment, residency.slot);
  moved(segment);
}

// An exchange failed: what left for it comes back to the device, as far as `segment` needs the room
// in swap space that it had before.
void Pager::putBack(Segment& segment, const std::vector<std::byte>& aside) {
  Residency& residency = segment.residency;
  exchange_->failed = true;
  try {
    residency.swap = swap_.allocate(segment.bytes);
    for (size_t i = 0; !residency.swap && i < exchange_->left.size(); ++i) {
      Residency& other = exchange_->left[i]->residency;
      bringIn(*exchange_->left[i], /*ahead=*/false);
      swap_.release(*other.swap);
      other.swap.reset();
      other.dirty = true;
      residency.swap = swap_.allocate(segment.bytes);
    }
    if (residency.swap) return swap_.write(*residency.swap, 0, aside.data(), segment.bytes);
  } catch (const c10::Error&) {
    if (residency.swap) swap_.release(*residency.swap);
    residency.swap.reset();
  }
  swapped_.erase(residency.slot);
  refuseLost(segment);
}

// A disk has failed, or was filled by others, while the only copy of a segment was on its way.
void Pager::refuseLost(const Segment& segment) {
  TORCH_CHECK_WITH(OutOfMemoryError, false, "a tensor of ", segment.bytes,
                   " bytes is lost: the device was full, and its spill directory did not take ",
                   "back what had been there. Free space there, or start the pool with ",
                   "$SHOAL_SPILL_DIR set to a directory that can be written.");
}

void Pager::arrived(Segment& segment) {
  const std::shared_ptr<CopyJob> job = std::exchange(segment.residency.incoming, nullptr);
  --incoming_;
  if (job->error != nullptr) {
    vacate(segment);  // it is still in swap space, wherever the trouble lies
    std::rethrow_exception(job->error);
  }
  moved(segment);
}

// --- out of the device

bool Pager::evictable(Segment& segment) const {
  return segment.storage.use_count() == 1 && segment.residency.incoming == nullptr &&
         segment.residency.used_at < now_ &&
         (segment.readers.empty() || readers_gone(segment, /*wait=*/false));
}

// The gap that followed the last one when it came before; in a loop, that is the next one.
uint64_t Pager::nextGap(const Residency& residency) {
  const auto& gaps = residency.gaps;
  const auto like = [](uint32_t a, uint32_t b) { return a - a / 8 <= b && b <= a + a / 8 + 2; };
  for (size_t i = 1; i < gaps.size() && gaps[i] > 0; ++i) {
    if (like(gaps[0], gaps[i])) return gaps[i - 1];
  }
  return *std::max_element(gaps.begin(), gaps.end());
}

// How far ahead the next use is, in messages; larger goes first.
double Pager::distance(const Segment& segment) const {
  const Residency& residency = segment.residency;
  const auto now = static_cast<double>(now_);
  if (options_.least_recent) return now - static_cast<double>(residency.used_at);
  const double unknown = 1e15 + now - static_cast<double>(residency.used_at);
  double ahead = unknown;
  const Lookahead::Event* next = lookahead_ == nullptr ? nullptr : lookahead_->next(residency.slot);
  if (next != nullptr) {
    if (lookahead_->isDead(residency.slot, now_)) return 1e18;
    ahead = static_cast<double>(next->sequence) - now;
  } else if (const uint64_t gap = nextGap(residency); gap > 0) {
    const double end = lookahead_ == nullptr ? now : static_cast<double>(lookahead_->end());
    const double learned = static_cast<double>(residency.used_at + gap);
    ahead = std::max(learned, end) - now + 1;
  }
  const bool copied = residency.outgoing != nullptr || (residency.swap && !residency.dirty);
  return copied ? ahead * kCleanFactor : ahead;
}

Segment* Pager::victim(double further_than, uint64_t refused_bytes) const {
  Segment* best = nullptr;
  double furthest = further_than;
  for (Segment* segment : resident_) {
    if (!evictable(*segment)) continue;
    if (segment->bytes >= refused_bytes && needsSwap(*segment)) continue;
    const double ahead = distance(*segment);
    if (ahead > furthest) {
      furthest = ahead;
      best = segment;
    }
  }
  return best;
}

// Copies of unchanged segments are worth less than room for changed ones.
bool Pager::takeBackCopies(uint64_t bytes) {
  uint64_t taken = 0;
  for (Segment* segment : resident_) {
    Residency& residency = segment->residency;
    if (!residency.swap || residency.swap->tier == SwapBlock::Tier::kAdopted ||
        residency.incoming != nullptr || residency.outgoing != nullptr) {
      continue;
    }
    swap_.release(*residency.swap);
    residency.swap.reset();
    taken += segment->bytes;
    if (taken >= bytes) return true;
  }
  return taken > 0;
}

bool Pager::isDead(const Segment& segment) const {
  return lookahead_ != nullptr && !options_.least_recent &&
         lookahead_->isDead(segment.residency.slot, now_);
}

// Whether it has to find room in swap space before it can leave.
bool Pager::needsSwap(const Segment& segment) const {
  return !segment.residency.swap && !segment.residency.in_place && !isDead(segment);
}

bool Pager::evict(Segment& segment) {
  Residency& residency = segment.residency;
  const bool dead = isDead(segment);
  if (residency.in_place) {
    // The host block is host memory: leaving the device moves nothing.
    arena_.charge(-static_cast<int64_t>(segment.bytes));
    residency.in_place = false;
    residency.dirty = false;
    counters_.dropped_bytes += segment.bytes;
  } else if (dead) {
    if (residency.outgoing != nullptr) dropCopyOut(segment);
    counters_.dropped_bytes += segment.bytes;
    residency.dropped = true;
  } else if (residency.outgoing != nullptr && copiedOut(segment)) {
    // Nothing is left to do.
  } else if (residency.swap && !residency.dirty) {
    counters_.dropped_bytes += segment.bytes;
  } else if (!copyOut(segment, /*ahead=*/false)) {
    return false;
  }
  vacate(segment);
  reserve_full_ = false;
  return true;
}

// Makes a copy in swap space, now or by the copier. False if there is no room for it.
bool Pager::copyOut(Segment& segment, bool ahead) {
  Residency& residency = segment.residency;
  if (!residency.swap) residency.swap = swap_.allocate(segment.bytes);
  if (!residency.swap && !ahead && takeBackCopies(segment.bytes)) {
    residency.swap = swap_.allocate(segment.bytes);
  }
  if (!residency.swap) return false;
  auto* data = static_cast<std::byte*>(segment.storage.mutable_data());
  if (ahead) {
    residency.outgoing =
        std::make_shared<CopyJob>(CopyJob{*residency.swap, data, segment.bytes, /*out=*/true});
    copier_->submit(residency.outgoing);
    count(*residency.swap, static_cast<int64_t>(segment.bytes), /*out=*/true);
    return true;
  }
  const int64_t start = transport::nowNs();
  swap_.write(*residency.swap, 0, data, segment.bytes);
  counters_.stall_ns += transport::nowNs() - start;
  count(*residency.swap, static_cast<int64_t>(segment.bytes), /*out=*/true);
  residency.dirty = false;
  return true;
}

// Waits for the copier. False if it could not write; then nothing has changed.
bool Pager::copiedOut(Segment& segment) {
  Residency& residency = segment.residency;
  const std::shared_ptr<CopyJob> job = std::exchange(residency.outgoing, nullptr);
  counters_.stall_ns += copier_->wait(*job);
  if (job->error != nullptr) {
    swap_.release(*residency.swap);
    residency.swap.reset();
    return false;
  }
  residency.dirty = false;
  return true;
}

// A copy that nobody will need.
void Pager::dropCopyOut(Segment& segment) {
  Residency& residency = segment.residency;
  const auto copied = static_cast<int64_t>(copier_->cancel(*residency.outgoing));
  count(*residency.swap, copied - static_cast<int64_t>(segment.bytes), /*out=*/true);
  residency.outgoing = nullptr;
}

// The segment is in swap space only.
void Pager::vacate(Segment& segment) {
  segment.storage =
      c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(), nullptr, false);
  remove(segment);
  swapped_[segment.residency.slot] = &segment;
  moved(segment);
}

// What was brought ahead of its use may have to make way after all. False if nothing was.
bool Pager::settleIncoming() {
  std::vector<Segment*> coming;
  for (Segment* segment : resident_) {
    if (segment->residency.incoming != nullptr) coming.push_back(segment);
  }
  for (Segment* segment : coming) {
    counters_.stall_ns += copier_->wait(*segment->residency.incoming);
    arrived(*segment);
  }
  return !coming.empty();
}

// What other devices read leaves when they have read it: they wait for nothing that comes after.
bool Pager::awaitReaders() {
  bool waited = false;
  for (Segment* segment : resident_) {
    if (segment->readers.empty() || segment->residency.used_at >= now_) continue;
    readers_gone(*segment, /*wait=*/true);
    waited = true;
  }
  return waited;
}

bool Pager::reclaim(uint64_t bytes) {
  if (exchange_ != nullptr && exchange_->failed) return false;  // what left is coming back
  if (!active_ && !options_.least_recent) copier_ = std::make_unique<Copier>(swap_);
  active_ = true;
  if (lookahead_ != nullptr) lookahead_->advance(now_);
  bool freed = false;
  uint64_t refused_bytes = UINT64_MAX;  // swap space has no room for so much; for less it may
  for (uint64_t got = 0; got < bytes;) {
    Segment* segment = victim(-1.0, refused_bytes);
    if (segment == nullptr && settleIncoming()) segment = victim(-1.0, refused_bytes);
    if (segment == nullptr && awaitReaders()) segment = victim(-1.0, refused_bytes);
    if (segment == nullptr) break;
    if (!evict(*segment)) {
      refused_bytes = segment->bytes;
      continue;
    }
    got += segment->bytes;
    freed = true;
    const Residency& gone = segment->residency;
    const bool in_swap = !gone.dropped && gone.swap->tier != SwapBlock::Tier::kAdopted;
    if (exchange_ != nullptr && in_swap) exchange_->left.push_back(segment);
  }
  return freed;
}

// --- ahead of the device

void Pager::between(uint64_t sequence) {
  now_ = sequence;
  if (!active_ || copier_ == nullptr || lookahead_ == nullptr) return;
  lookahead_->advance(sequence);
  try {
    prefetch(sequence);
    if (!reserve_full_) keepReserve();
  } catch (const c10::Error&) {
    // Swap space cannot be written. Whoever really needs the room will say so.
    reserve_full_ = true;
  }
}

// The next victims can go at once: their bytes are copied before their room is asked for.
void Pager::keepReserve() {
  if (copier_->waiting() > 0) return;
  ranked_.clear();
  for (Segment* segment : resident_) {
    const double ahead = evictable(*segment) ? distance(*segment) : 0.0;
    if (ahead > 1.0) ranked_.emplace_back(ahead, segment);
  }
  std::make_heap(ranked_.begin(), ranked_.end());
  for (uint64_t ready = arena_.roomBytes(); ready < reserveBytes() && !ranked_.empty();) {
    std::pop_heap(ranked_.begin(), ranked_.end());
    Segment& segment = *ranked_.back().second;
    ranked_.pop_back();
    const Residency& residency = segment.residency;
    ready += segment.bytes;
    if (isDead(segment) || residency.in_place || residency.outgoing != nullptr) continue;
    if (residency.swap && !residency.dirty) continue;
    reserve_full_ = !copyOut(segment, /*ahead=*/true);
    return;  // the next one when it is done
  }
  reserve_full_ = true;
}

// What is used next comes first, and never in the place of something that is used sooner.
void Pager::prefetch(uint64_t sequence) {
  if (swapped_.empty()) return;
  size_t seen = 0;
  for (const auto& [when, slot] : lookahead_->order()) {
    if (incoming_ >= kIncomingMax || ++seen > kLookMax) return;
    if (when > sequence + kPrefetchMessages) return;
    const auto found = swapped_.find(slot);
    if (found == swapped_.end() || when <= sequence) continue;
    Segment& segment = *found->second;
    const Lookahead::Event* next = lookahead_->next(slot);
    if (next == nullptr || next->frees || next->sequence != when) continue;
    if (!makeRoomAhead(segment.bytes, static_cast<double>(when - sequence) * kCleanFactor)) return;
    bringIn(segment, /*ahead=*/true);
  }
}

// Room for what comes, as far as nothing has to be waited for.
bool Pager::makeRoomAhead(uint64_t bytes, double further_than) {
  while (arena_.roomBytes() < bytes) {
    Segment* last = victim(further_than);
    if (last == nullptr) return false;
    const Residency& residency = last->residency;
    if (residency.outgoing != nullptr && !copier_->done(*residency.outgoing)) return false;
    const bool copied = residency.outgoing != nullptr || (residency.swap && !residency.dirty);
    if (!copied && !residency.in_place && !isDead(*last)) {
      copyOut(*last, /*ahead=*/true);
      return false;
    }
    if (!evict(*last)) return false;
  }
  return true;
}

void Pager::count(const SwapBlock& block, int64_t bytes, bool out) {
  const auto change = static_cast<uint64_t>(bytes);  // modulo 2^64 where something is taken back
  (out ? counters_.out_bytes : counters_.in_bytes) += change;
  if (block.tier == SwapBlock::Tier::kDisk) counters_.disk_bytes += change;
}

}  // namespace shoal::worker
