#include "worker/paging/arena.h"

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

Arena::Arena(memory::SharedMemory region, uint64_t limit_bytes, std::string device_name)
    : memory_(std::move(region)),
      limit_bytes_(limit_bytes),
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
    uint64_t missing = 0;
    {
      std::lock_guard lock(mutex_);
      if (bytes <= room()) offset = blocks_.allocate(bytes);
      behind = blocks_.highWater() + kPopulateAhead > populated_;
      missing = bytes - std::min<uint64_t>(bytes, room());
    }
    if (offset) break;
    if (reclaimer_ == nullptr || !reclaimer_->reclaim(std::max<uint64_t>(missing, 1))) {
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
}

uint64_t Arena::room() const {
  const uint64_t used = blocks_.usedBytes() + charged_bytes_;
  return used < limit_bytes_ ? limit_bytes_ - used : 0;
}

uint64_t Arena::roomBytes() const {
  std::lock_guard lock(mutex_);
  return room();
}

void Arena::charge(int64_t bytes) {
  std::lock_guard lock(mutex_);
  charged_bytes_ += static_cast<uint64_t>(bytes);
}

c10::DeleterFnPtr Arena::raw_deleter() const {
  return &release;
}

void Arena::copy_data(void* to, const void* from, std::size_t bytes) const {
  std::memcpy(to, from, bytes);
}

void Arena::outOfMemory(size_t bytes) const {
  std::lock_guard lock(mutex_);
  TORCH_CHECK_WITH(OutOfMemoryError, false, "shoal device ", device_name_,
                   " is out of memory. Tried to allocate ", memory::readable(bytes), "; ",
                   memory::readable(blocks_.usedBytes() + charged_bytes_), " of ",
                   memory::readable(limit_bytes_),
                   " are in use. Free tensors, use a smaller batch, or lease more with ",
                   "shoal.connect(memory=\"8GiB\").");
}

void Arena::populateAhead() {
  std::unique_lock lock(mutex_);
  while (true) {
    const size_t goal = std::min<size_t>(blocks_.highWater() + kPopulateAhead,
                                         std::max<size_t>(limit_bytes_, blocks_.highWater()));
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

void Arena::trim() {
  std::lock_guard lock(mutex_);
  for (const auto& [offset, bytes] : blocks_.freeRanges()) memory_.unmap(offset, bytes);
  populated_ = std::min(populated_, blocks_.highWater());
}

}  // namespace shoal::worker
