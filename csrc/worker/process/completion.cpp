#include "worker/process/completion.h"

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
  Entry entry{issued_, failed_, {}, std::exchange(reply_, std::nullopt)};
  try {
    entry.points = late_->lanes.points();
  } catch (...) {
    condemn(issued_);
  }
  add(std::move(entry));
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
    wait(*entry);
    tell(*entry);
    const std::lock_guard lock(mutex_);
    entries_.pop_front();
  }
}

bool Completion::isDone(const Entry& entry) {
  try {
    for (const Ticket ticket : entry.points) {
      if (!device_->isPast(ticket)) return false;
    }
  } catch (...) {
    condemn(entry.sequence);
  }
  return true;
}

void Completion::wait(const Entry& entry) {
  try {
    for (const Ticket ticket : entry.points) device_->wait(ticket);
  } catch (...) {
    condemn(entry.sequence);
  }
}

void Completion::condemn(uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  if (lost_ == nullptr) lost_ = describe(std::current_exception(), sequence, "");
}

void Completion::tell(const Entry& entry) {
  bool lost = false;
  {
    const std::lock_guard lock(mutex_);
    lost = lost_ != nullptr;
  }
  if (entry.reply) {
    answer(entry);
    replies_due_.fetch_sub(1, std::memory_order_seq_cst);
    return;
  }
  progress_.failed.store(entry.failed || lost ? 1 : 0, std::memory_order_relaxed);
  transport::publish(progress_, entry.sequence);
}

void Completion::answer(const Entry& entry) {
  const Reply& reply = *entry.reply;
  std::shared_ptr<const Failure> lost;
  {
    const std::lock_guard lock(mutex_);
    lost = lost_;
  }
  if (lost != nullptr) {
    ring_.send(reply.kind, lost->kind, entry.sequence, errorPayload(*lost, /*shown_in=*/0));
  } else {
    ring_.send(reply.kind, reply.error, entry.sequence, reply.payload);
  }
}

}  // namespace shoal::worker
