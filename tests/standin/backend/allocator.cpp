// Device memory for torch: a caching allocator on the driver's virtual memory, as CUDA's own. A
// freed block is at once the stream's that it was made for; a block that other streams used waits
// for them. `standin_set_allocator` puts other functions in its place, as torch's pluggable
// allocator does.
#include <c10/core/CachingDeviceAllocator.h>

#include <map>
#include <mutex>
#include <set>

#include "../driver/api.h"
#include "../driver/standin.h"
#include "backend.h"

namespace standin {
namespace {

constexpr uint64_t kAlignment = 512;
constexpr uint64_t kPage = 2ULL << 20;
constexpr uint64_t kChunkBytes = 16ULL << 20;

using Allocate = void* (*)(size_t bytes, int device, void* stream);
using Free = void (*)(void* block, size_t bytes, int device, void* stream);
Allocate other_allocate = nullptr;
Free other_free = nullptr;

uint64_t roundUp(uint64_t bytes, uint64_t to) {
  return (bytes + to - 1) / to * to;
}

struct Chunk {
  uint64_t bytes;
  CUmemHandle handle;
};

// The free blocks of a stream.
struct Pool {
  std::set<std::pair<uint64_t, uint64_t>> by_size;  // and address
  std::map<uint64_t, uint64_t> by_address;          // bytes

  void add(uint64_t at, uint64_t bytes) {
    auto next = by_address.lower_bound(at);
    if (next != by_address.end() && next->first == at + bytes) {
      bytes += next->second;
      next = remove(next);
    }
    if (next != by_address.begin() && std::prev(next)->first + std::prev(next)->second == at) {
      at = std::prev(next)->first;
      bytes += std::prev(next)->second;
      remove(std::prev(next));
    }
    by_address[at] = bytes;
    by_size.insert({bytes, at});
  }
  std::map<uint64_t, uint64_t>::iterator remove(std::map<uint64_t, uint64_t>::iterator block) {
    by_size.erase({block->second, block->first});
    return by_address.erase(block);
  }
  uint64_t take(uint64_t bytes) {
    const auto found = by_size.lower_bound({bytes, 0});
    if (found == by_size.end()) return 0;
    const auto [whole, at] = *found;
    remove(by_address.find(at));
    if (whole > bytes) add(at + bytes, whole - bytes);
    return at;
  }
};

struct Block {
  uint64_t bytes;
  c10::DeviceIndex device;
  c10::StreamId stream;
  std::set<c10::StreamId> users;  // other streams
};

struct Awaited {
  uint64_t at;
  Block block;
  std::vector<void*> events;
};

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::DeviceIndex device = currentDeviceIndex();
    const c10::Device where(c10::kCUDA, device);
    if (bytes == 0) return {nullptr, nullptr, &deleteBlock, where};
    ensureDevice(device);
    const c10::StreamId stream = currentStream(device).id();
    const uint64_t rounded = roundUp(bytes, kAlignment);
    uint64_t at = 0;
    if (other_allocate != nullptr) {
      at = reinterpret_cast<uint64_t>(
          other_allocate(bytes, device, reinterpret_cast<void*>(stream)));
      const std::lock_guard guard(lock_);
      blocks_[at] = {bytes, device, stream, {}};
    } else {
      at = serve(rounded, device, stream);
    }
    auto* data = reinterpret_cast<void*>(at);
    return {data, data, &deleteBlock, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &deleteBlock; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    const c10::Stream stream = currentStream(currentDeviceIndex());
    ensureDevice(stream.device_index());
    check(cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(from),
                        bytes, handleOf(stream)),
          "copy_data");
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    ensureDevice(currentDeviceIndex());
    check(cuCtxSynchronize(), "emptyCache");
    const std::lock_guard guard(lock_);
    collect(/*all=*/true);
    releaseChunks(currentDeviceIndex());
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    const std::lock_guard guard(lock_);
    const auto found = blocks_.find(reinterpret_cast<uint64_t>(data.get()));
    if (found != blocks_.end() && found->second.stream != stream.id()) {
      found->second.users.insert(stream.id());
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const std::lock_guard guard(lock_);
    return stats_[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    const std::lock_guard guard(lock_);
    stats_[device].allocated_bytes[0].reset_peak();
    stats_[device].reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    size_t free = 0, total = 0;
    ensureDevice(device);
    check(cuMemGetInfo_v2(&free, &total), "cuMemGetInfo");
    return {free, total};
  }

 private:
  using PoolKey = std::pair<c10::DeviceIndex, c10::StreamId>;

  static void deleteBlock(void* data);
  void free(uint64_t at) {
    std::unique_lock guard(lock_);
    const auto found = blocks_.find(at);
    if (found == blocks_.end()) return;
    Block block = std::move(found->second);
    blocks_.erase(found);
    if (other_free != nullptr) {
      guard.unlock();
      other_free(reinterpret_cast<void*>(at), block.bytes, block.device,
                 reinterpret_cast<void*>(block.stream));
      return;
    }
    stats_[block.device].allocated_bytes[0].decrease(block.bytes);
    if (block.users.empty()) return pools_[{block.device, block.stream}].add(at, block.bytes);
    Awaited awaited{at, block, {}};
    ensureDevice(block.device);
    for (const c10::StreamId user : block.users) {
      void* event = nullptr;
      cuEventCreate(&event, 2);
      cuEventRecord(event, reinterpret_cast<void*>(user));
      awaited.events.push_back(event);
    }
    awaited_.push_back(std::move(awaited));
  }

  uint64_t serve(uint64_t bytes, c10::DeviceIndex device, c10::StreamId stream) {
    const std::lock_guard guard(lock_);
    Pool& pool = pools_[{device, stream}];
    uint64_t at = pool.take(bytes);
    if (at == 0) {
      collect(/*all=*/false);
      at = pool.take(bytes);
    }
    if (at == 0 && !grow(pool, bytes, device)) {
      ++stats_[device].num_alloc_retries;
      check(cuCtxSynchronize(), "cuCtxSynchronize");
      collect(/*all=*/true);
      releaseChunks(device);
      if (!grow(pool, bytes, device)) refuse(bytes, device);
    }
    if (at == 0) at = pool.take(bytes);
    blocks_[at] = {bytes, device, stream, {}};
    stats_[device].allocated_bytes[0].increase(bytes);
    return at;
  }

  [[noreturn]] void refuse(uint64_t bytes, c10::DeviceIndex device) {
    ++stats_[device].num_ooms;
    size_t free = 0, total = 0;
    cuMemGetInfo_v2(&free, &total);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", bytes >> 20,
                     " MiB. GPU ", static_cast<int>(device), " has a total capacity of ",
                     total >> 20, " MiB of which ", free >> 20, " MiB is free.");
  }

  // Under the lock. Maps new memory; false: the device has none left.
  bool grow(Pool& pool, uint64_t bytes, c10::DeviceIndex device) {
    const uint64_t least = roundUp(bytes, kPage);
    return growBy(pool, std::max(least, kChunkBytes), device) || growBy(pool, least, device);
  }
  bool growBy(Pool& pool, uint64_t bytes, c10::DeviceIndex device) {
    CUmemAllocationProp wanted{};
    wanted.type = 1;
    wanted.location = {1, device};
    Chunk chunk{bytes, 0};
    const CUresult made = cuMemCreate(&chunk.handle, bytes, &wanted, 0);
    if (made == CUDA_ERROR_OUT_OF_MEMORY) return false;
    check(made, "cuMemCreate");
    CUdeviceptr at = 0;
    CUresult result = cuMemAddressReserve(&at, bytes, 0, 0, 0);
    if (result == CUDA_SUCCESS) result = cuMemMap(at, bytes, 0, chunk.handle, 0);
    std::vector<CUmemAccessDesc> access;
    for (int i = 0; i < deviceCount(); ++i) access.push_back({{1, i}, 3});
    if (result == CUDA_SUCCESS) result = cuMemSetAccess(at, bytes, access.data(), access.size());
    if (result != CUDA_SUCCESS) {
      if (at != 0) {
        cuMemUnmap(at, bytes);
        cuMemAddressFree(at, bytes);
      }
      cuMemRelease(chunk.handle);
      check(result, "mapping device memory");
    }
    chunks_[device][at] = chunk;
    stats_[device].reserved_bytes[0].increase(bytes);
    pool.add(at, bytes);
    return true;
  }

  // Under the lock. Takes back the blocks that no stream uses any more.
  void collect(bool all) {
    std::erase_if(awaited_, [&](Awaited& awaited) {
      for (void* event : awaited.events) {
        if (!all && cuEventQuery(event) != CUDA_SUCCESS) return false;
        if (all) cuEventSynchronize(event);
      }
      for (void* event : awaited.events) cuEventDestroy_v2(event);
      pools_[{awaited.block.device, awaited.block.stream}].add(awaited.at, awaited.block.bytes);
      return true;
    });
  }

  // Under the lock, behind a synchronisation. Gives chunks back that are free as a whole.
  void releaseChunks(c10::DeviceIndex device) {
    std::erase_if(chunks_[device], [&](const auto& entry) {
      const auto& [at, chunk] = entry;
      for (auto& [key, pool] : pools_) {
        auto block = pool.by_address.upper_bound(at);
        if (block == pool.by_address.begin()) continue;
        --block;
        const auto [start, bytes] = *block;
        if (start > at || start + bytes < at + chunk.bytes) continue;
        pool.remove(block);
        if (at > start) pool.add(start, at - start);
        const uint64_t end = at + chunk.bytes;
        if (start + bytes > end) pool.add(end, start + bytes - end);
        cuMemUnmap(at, chunk.bytes);
        cuMemAddressFree(at, chunk.bytes);
        cuMemRelease(chunk.handle);
        stats_[device].reserved_bytes[0].decrease(chunk.bytes);
        return true;
      }
      return false;
    });
  }

  std::mutex lock_;
  std::map<PoolKey, Pool> pools_;
  std::map<uint64_t, Block> blocks_;
  std::map<uint64_t, Chunk> chunks_[16];
  std::vector<Awaited> awaited_;
  c10::CachingDeviceAllocator::DeviceStats stats_[16];
};

DeviceAllocator& own() {
  static auto* const made = new DeviceAllocator;
  return *made;
}

// Destructors call it, also those of a program whose context is lost.
void DeviceAllocator::deleteBlock(void* data) {
  try {
    if (data != nullptr) own().free(reinterpret_cast<uint64_t>(data));
  } catch (const c10::Error&) {
  }
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    ensureDevice(currentDeviceIndex());
    if (bytes > 0) check(cuMemHostAlloc(&data, bytes, 0), "cuMemHostAlloc");
    return {data, data, &deleteBlock, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &deleteBlock; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void deleteBlock(void* data) {
    if (data == nullptr) return;
    try {
      ensureDevice(currentDeviceIndex());
    } catch (const c10::Error&) {
      return;
    }
    cuCtxSynchronize();  // a copy may still read it
    cuMemFreeHost(data);
  }
};

const bool registered = [] {
  c10::SetAllocator(c10::kCUDA, &own());
  return true;
}();

}  // namespace

c10::Allocator* deviceAllocator() {
  return c10::GetAllocator(c10::kCUDA);
}

c10::Allocator* pinnedAllocator() {
  static auto* const made = new PinnedAllocator;
  return made;
}

}  // namespace standin

extern "C" STANDIN_EXPORT void standin_set_allocator(void* allocate, void* free) {
  standin::other_allocate = reinterpret_cast<standin::Allocate>(allocate);
  standin::other_free = reinterpret_cast<standin::Free>(free);
}
