#include "worker/process/completion.h"

#include <algorithm>
#include <utility>

#include "base/futex.h"
#include "worker/accelerator/start.h"

namespace shoal::worker {
namespace {

constexpr uint64_t kMessagesMax = 32;  // that are told together
constexpr int64_t kLookMs = 5;         // between two looks that nobody has asked for
constexpr int64_t kIdleMs = 1000;

// Whether others may wait for such a message: for memory that it uses, or for what it makes.
bool isAwaited(wire::Kind kind) {
  using wire::Kind;
  return kind == Kind::kCopyIn || kind == Kind::kCopyOut || kind == Kind::kLoad ||
         kind == Kind::kEventRecord || kind == Kind::kExport || kind == Kind::kFetch ||
         kind == Kind::kFetchAdd;
}

}  // namespace

Completion::Completion(transport::Progress& progress, RingReplies& ring)
    : progress_(progress), ring_(ring), reads_(ring) {
  progress_.runs_late.store(1, std::memory_order_seq_cst);
}

void Completion::start(Accelerator& device, Late& late) {
  device_ = &device;
  late_ = &late;
}

void Completion::send(wire::Kind kind, wire::ErrorKind error, uint64_t sequence,
                      const std::vector<uint64_t>& payload) {
  if (kind != wire::Kind::kSync) return ring_.sendEarly(kind, error, sequence, payload);
  reply_ = Reply{kind, error, payload};
}

void Completion::sendBytes(wire::Kind, uint64_t sequence, std::span<const std::byte> bytes) {
  reads_.add(*late_, sequence, bytes);
}

void Completion::beforeIssuing(wire::Kind kind) {
  using wire::Kind;
  if (kind == Kind::kFetch || kind == Kind::kFetchAdd || kind == Kind::kExport) flush();
}

void Completion::issued(wire::Kind kind, uint64_t sequence, bool failed) {
  issued_ = sequence;
  failed_ = failed;
  progress_.issued.store(sequence, std::memory_order_release);
  if (reply_ || isAwaited(kind) || sequence - told_ >= kMessagesMax) flush();
}

void Completion::flush() {
  if (told_ == issued_) return;
  told_ = issued_;
  add({issued_, failed_, late_->lanes.points(), std::exchange(reply_, std::nullopt)});
}

void Completion::add(Entry entry) {
  const bool replies = entry.reply.has_value();
  bool was_empty = false;
  {
    const std::lock_guard lock(mutex_);
    was_empty = entries_.empty();
    entries_.push_back(std::move(entry));
  }
  if (replies) replies_due_.fetch_add(1, std::memory_order_seq_cst);
  if (!replies && !was_empty) return;
  progress_.asked.fetch_add(1, std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst)) transport::futexWake(&progress_.asked, INT_MAX);
}

// Only its own thread removes entries, so the first one stays.
Completion::Entry* Completion::first() {
  const std::lock_guard lock(mutex_);
  return entries_.empty() ? nullptr : &entries_.front();
}

bool Completion::isWanted() const {
  return replies_due_.load(std::memory_order_seq_cst) > 0 ||
         progress_.awaited.load(std::memory_order_seq_cst) != 0;
}

void Completion::run() {
  enterDevice(device_->device());
  while (true) {
    const uint32_t asked = progress_.asked.load(std::memory_order_seq_cst);
    const Entry* entry = first();
    if (entry == nullptr || !isWanted()) {
      asleep_.store(true, std::memory_order_seq_cst);
      transport::futexWait(&progress_.asked, asked, entry == nullptr ? kIdleMs : kLookMs);
      asleep_.store(false, std::memory_order_seq_cst);
      if (entry == nullptr || (!isWanted() && !isDone(*entry))) continue;
    }
    for (const Ticket ticket : entry->points) device_->wait(ticket);
    tell(*entry);
    const std::lock_guard lock(mutex_);
    entries_.pop_front();
  }
}

bool Completion::isDone(const Entry& entry) {
  return std::all_of(entry.points.begin(), entry.points.end(),
                     [this](Ticket ticket) { return device_->isPast(ticket); });
}

void Completion::tell(const Entry& entry) {
  if (const auto& reply = entry.reply) {
    ring_.send(reply->kind, reply->error, entry.sequence, reply->payload);
    replies_due_.fetch_sub(1, std::memory_order_seq_cst);
    return;
  }
  progress_.failed.store(entry.failed ? 1 : 0, std::memory_order_relaxed);
  transport::publish(progress_, entry.sequence);
}

}  // namespace shoal::worker
