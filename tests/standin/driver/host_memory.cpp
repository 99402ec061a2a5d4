#include "host_memory.h"

#include <map>
#include <mutex>

#include "checker.h"

namespace standin {
namespace {

struct Registered {
  std::mutex lock;
  std::map<uint64_t, uint64_t> ranges;  // bytes by address
};

Registered& registered() {
  static auto* const made = new Registered;
  return *made;
}

}  // namespace

CUresult registerHost(uint64_t address, uint64_t bytes) {
  Registered& all = registered();
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard guard(all.lock);
  const auto next = all.ranges.lower_bound(address);
  const bool overlaps =
      (next != all.ranges.end() && next->first < address + bytes) ||
      (next != all.ranges.begin() && std::prev(next)->first + std::prev(next)->second > address);
  if (overlaps) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  all.ranges[address] = bytes;
  return CUDA_SUCCESS;
}

CUresult unregisterHost(uint64_t address) {
  Registered& all = registered();
  uint64_t bytes = 0;
  {
    const std::lock_guard guard(all.lock);
    const auto found = all.ranges.find(address);
    if (found == all.ranges.end()) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    bytes = found->second;
    all.ranges.erase(found);
  }
  checker().forget(address, bytes);
  return CUDA_SUCCESS;
}

bool isRegistered(uint64_t address, uint64_t bytes) {
  Registered& all = registered();
  const std::lock_guard guard(all.lock);
  // Neighbours that were registered one by one count together.
  for (uint64_t at = address; at < address + bytes;) {
    const auto next = all.ranges.upper_bound(at);
    if (next == all.ranges.begin()) return false;
    const auto& [start, length] = *std::prev(next);
    if (start + length <= at) return false;
    at = start + length;
  }
  return true;
}

uint64_t registeredBytes() {
  Registered& all = registered();
  const std::lock_guard guard(all.lock);
  uint64_t bytes = 0;
  for (const auto& [start, length] : all.ranges) bytes += length;
  return bytes;
}

}  // namespace standin
