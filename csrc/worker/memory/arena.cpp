#include "worker/memory/arena.h"

#include <c10/util/Exception.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstring>

#include "base/byte_units.h"

namespace shoal::worker {
namespace {

constexpr size_t kPopulateStep = size_t{8} << 20;
constexpr size_t kPopulateAhead = size_t{32} << 20;

Arena* g_arena = nullptr;  // one per worker process: release() gets no pointer to its arena

}  // namespace

Arena::Arena(memory::SharedMemory region, uint64_t limit_bytes, std::string device_name,
             Grant* grant)
    : memory_(std::move(region)),
      limit_bytes_(limit_bytes),
      grant_(grant),
      device_name_(std::move(device_name)),
      blocks_(memory_.bytes()) {
  g_arena = this;
  populator_ = std::thread([this] {
    prctl(PR_SET_NAME, "shoal-populate");
    populateAhead();
  });
}

Arena::~Arena() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  populator_.join();
  g_arena = nullptr;
}

c10::DataPtr Arena::allocate(size_t bytes) {
  const c10::Device cpu(c10::DeviceType::CPU);
  if (bytes == 0) return {nullptr, nullptr, &release, cpu};
  std::optional<size_t> offset;
  bool behind;
  while (true) {
    uint64_t missing = 0, needed = 0;
    bool possible = false;
    {
      std::lock_guard lock(mutex_);
      if (bytes <= room()) offset = blocks_.allocate(bytes);
      behind = blocks_.highWater() + kPopulateAhead > populated_;
      missing = bytes - std::min<uint64_t>(bytes, room());
      // A hostile size may be near 2^64: the sum must not wrap around.
      possible = bytes <= limit_bytes_ - std::min<uint64_t>(used(), limit_bytes_);
      needed = possible ? used() + bytes : 0;
      if (offset && grant_ != nullptr) grant_->publishUsed(used());
    }
    if (offset) break;
    if (reclaimer_ != nullptr && reclaimer_->reclaim(std::max<uint64_t>(missing, 1))) continue;
    if (missing == 0 || !possible || grant_ == nullptr || !grant_->await(needed)) {
      outOfMemory(bytes);
    }
  }
  if (behind) wake_.notify_one();
  void* data = memory_.data() + *offset;
  return {data, data, &release, cpu};
}

void Arena::release(void* context) {
  if (context == nullptr || g_arena == nullptr) return;
  std::lock_guard lock(g_arena->mutex_);
  g_arena->blocks_.release(
      static_cast<size_t>(static_cast<std::byte*>(context) - g_arena->memory_.data()));
  if (g_arena->grant_ != nullptr) {
    g_arena->grant_->publishUsed(g_arena->used());
  }
}

uint64_t Arena::room() const {
  const uint64_t most = limit();
  return used() < most ? most - used() : 0;
}

uint64_t Arena::excessBytes() const {
  std::lock_guard lock(mutex_);
  return used() - std::min(used(), limit());
}

uint64_t Arena::roomBytes() const {
  std::lock_guard lock(mutex_);
  return room();
}

void Arena::charge(int64_t bytes) {
  std::lock_guard lock(mutex_);
  charged_bytes_ += static_cast<uint64_t>(bytes);
  if (grant_ != nullptr) grant_->publishUsed(used());
}

c10::DeleterFnPtr Arena::raw_deleter() const {
  return &release;
}

void Arena::copy_data(void* to, const void* from, std::size_t bytes) const {
  std::memcpy(to, from, bytes);
}

void Arena::outOfMemory(size_t bytes) const {
  std::lock_guard lock(mutex_);
  const uint64_t ceiling = grant_ == nullptr ? 0 : std::min(limit_bytes_, grant_->ceilingBytes());
  TORCH_CHECK_WITH(OutOfMemoryError, false, "shoal device ", device_name_,
                   " is out of memory. Tried to allocate ", memory::readable(bytes), "; ",
                   memory::readable(blocks_.usedBytes() + charged_bytes_), " of ",
                   memory::readable(std::max(limit(), ceiling)),
                   " are in use. Free tensors, use a smaller batch, or lease more with ",
                   "shoal.connect(memory=\"8GiB\").");
}

void Arena::populateAhead() {
  std::unique_lock lock(mutex_);
  while (true) {
    const size_t goal = std::min<size_t>(blocks_.highWater() + kPopulateAhead,
                                         std::max<size_t>(limit(), blocks_.highWater()));
    if (stopping_) return;
    if (populated_ >= goal) {
      wake_.wait(lock);
      continue;
    }
    const size_t from = populated_;
    const size_t bytes = std::min(kPopulateStep, blocks_.capacity() - from);
    populated_ = from + bytes;
    lock.unlock();
    memory_.map(from, bytes);
    lock.lock();
  }
}

size_t Arena::usedBytes() const {
  std::lock_guard lock(mutex_);
  return blocks_.usedBytes();
}

size_t Arena::reservedBytes() const {
  std::lock_guard lock(mutex_);
  return populated_;
}

void Arena::setAside(bool aside) {
  std::lock_guard lock(mutex_);
  const uint64_t bytes = blocks_.usedBytes() + charged_bytes_;
  aside_ = aside;
  if (grant_ != nullptr) {
    grant_->setAside(aside ? bytes : 0);
    grant_->publishUsed(used());
  }
}

void Arena::trim() {
  std::lock_guard lock(mutex_);
  for (const auto& [offset, bytes] : blocks_.freeRanges()) memory_.unmap(offset, bytes);
  populated_ = std::min(populated_, blocks_.highWater());
}

}  // namespace shoal::worker
