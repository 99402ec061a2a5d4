#include "client/space/host_memory.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/byte_units.h"
#include "client/space/devices.h"
#include "client/space/session.h"

namespace shoal::client {
namespace {

std::atomic<HostMemory*> g_host{nullptr};
std::mutex g_host_mutex;

uint64_t physicalBytes() {
  return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

HostMemory::HostMemory()
    : region_(memory::SharedMemory::create("shoal-host", physicalBytes())),
      blocks_(region_.bytes()) {}

HostMemory& HostMemory::get() {
  if (HostMemory* host = g_host.load(std::memory_order_acquire)) return *host;
  std::lock_guard lock(g_host_mutex);
  if (g_host.load() == nullptr)
    g_host.store(new HostMemory);  // never freed: tensors may outlive us
  return *g_host.load();
}

bool HostMemory::exists() {
  return g_host.load(std::memory_order_acquire) != nullptr;
}

uint64_t HostMemory::allocate(uint64_t bytes) {
  TORCH_CHECK(!abandoned_,
              "shoal's pinned memory cannot be used in a process that was forked from one "
              "that uses it; start it with torch.multiprocessing.set_start_method('spawn')");
  std::lock_guard lock(mutex_);
  if (!left_.empty()) reclaimLeft();
  const auto offset = blocks_.allocate(bytes);
  TORCH_CHECK_WITH(OutOfMemoryError, offset.has_value(), "shoal's pinned host memory is ",
                   "out of memory. Tried to allocate ", memory::readable(bytes), "; ",
                   memory::readable(blocks_.usedBytes()), " of ",
                   memory::readable(blocks_.capacity()), " are in use. Free pinned tensors.");
  return *offset;
}

void HostMemory::release(uint64_t offset) {
  std::lock_guard lock(mutex_);
  blocks_.release(offset);
}

void HostMemory::releaseAfter(std::vector<uint64_t> offsets,
                              std::vector<memory::SharedMemory> workers) {
  std::lock_guard lock(mutex_);
  left_.push_back({std::move(offsets), std::move(workers)});
  reclaimLeft();
}

void HostMemory::reclaimLeft() {
  const auto over = [this](const Left& left) {
    const bool alive = std::any_of(left.workers.begin(), left.workers.end(),
                                   [](const auto& worker) { return worker.isClaimed(); });
    if (alive) return false;
    for (const uint64_t offset : left.offsets) blocks_.release(offset);
    return true;
  };
  left_.erase(std::remove_if(left_.begin(), left_.end(), over), left_.end());
}

void HostMemory::usedBy(const void* p, const Member& stream, uint64_t sequence) {
  std::lock_guard lock(mutex_);
  last_use_[offsetOf(p)] = {stream.session(), stream.number(), sequence};
}

Member* HostMemory::pendingOn(const Use& use) {
  Session* session = Devices::get().byNumber(use.session);
  Member* stream = session == nullptr ? nullptr : &session->member(use.member);
  const bool over = stream == nullptr || !stream->usable() || stream->isDone(use.sequence);
  return over ? nullptr : stream;
}

bool HostMemory::inUse(const void* p, uint64_t bytes) {
  std::vector<Use> uses;
  {
    std::lock_guard lock(mutex_);
    const uint64_t offset = offsetOf(p);
    // From the last use that begins at or before these bytes to the last that begins within them.
    auto it = last_use_.upper_bound(offset);
    if (it != last_use_.begin()) --it;
    for (; it != last_use_.end() && it->first < offset + bytes; ++it) uses.push_back(it->second);
  }
  return std::any_of(uses.begin(), uses.end(),
                     [](const Use& use) { return pendingOn(use) != nullptr; });
}

void HostMemory::releasePinned(uint64_t offset) {
  std::vector<Use> uses;
  {
    std::lock_guard lock(mutex_);
    const uint64_t end = offset + blocks_.blockBytes(offset);
    for (auto it = last_use_.lower_bound(offset); it != last_use_.end() && it->first < end;) {
      uses.push_back(it->second);
      it = last_use_.erase(it);
    }
  }
  // Released by the last stream that still has to pass a use; the others are waited for.
  Member* last = nullptr;
  uint64_t sequence = 0;
  for (const Use& use : uses) {
    Member* stream = pendingOn(use);
    if (stream == nullptr) continue;
    if (last == nullptr || last == stream) {
      last = stream;
      sequence = std::max(sequence, use.sequence);
    } else {
      stream->waitDone(use.sequence, /*hears_signals=*/false);
    }
  }
  if (last != nullptr) {
    Session* session = Devices::get().byNumber(last->session());
    session->hostReleases(session->lock()).add(offset, *last, sequence);
  } else {
    release(offset);
  }
}

class HostMemory::PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &drop, cpu};
    HostMemory& host = HostMemory::get();
    void* data = host.at(host.allocate(bytes));
    return {data, data, &drop, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

 private:
  static void drop(void* context) {
    if (context == nullptr) return;
    HostMemory& host = HostMemory::get();
    host.releasePinned(host.offsetOf(context));
  }
};

c10::Allocator* HostMemory::pinnedAllocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

}  // namespace shoal::client
