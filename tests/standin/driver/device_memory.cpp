#include "device_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "checker.h"
#include "config.h"
#include "shared_state.h"

namespace standin {
namespace {

constexpr uint64_t kWindowBytes = 1ULL << 43;  // 8 TiB of addresses; none is given out twice

struct Windows {
  uint64_t start;
  uint64_t next;
  Windows() {
    void* both = mmap(nullptr, 2 * kWindowBytes, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (both == MAP_FAILED) {
      std::fprintf(stderr, "standin: the process has no address space left for device memory\n");
      std::abort();
    }
    start = (reinterpret_cast<uint64_t>(both) + kGranularity - 1) / kGranularity * kGranularity;
    next = start;
  }
  uint64_t end() const { return start + kWindowBytes - kGranularity; }
};

Windows& windows() {
  static Windows made;
  return made;
}

// Memory of a device. It lives as long as a handle or a mapping of this process.
struct Physical {
  int fd;
  uint64_t bytes;
  int device;
  bool own;  // counted against the device by this process
  ~Physical() {
    close(fd);
    if (own) giveBack(device, bytes);
  }
};

struct Mapping {
  uint64_t bytes;
  std::shared_ptr<Physical> memory;
  std::vector<int> access;  // by device
};

struct Tables {
  std::mutex lock;
  std::map<uint64_t, uint64_t> reserved;  // bytes by address
  std::map<uint64_t, Mapping> mappings;   // by address
  std::map<CUmemHandle, std::shared_ptr<Physical>> handles;
  CUmemHandle next_handle = 1;
};

Tables& tables() {
  static auto* const made = new Tables;  // kernels may still run when the process ends
  return *made;
}

void* aliasPointer(uint64_t address) {
  return reinterpret_cast<void*>(address + kWindowBytes);
}

// Under the lock. The mapping that covers an address, or null.
const std::pair<const uint64_t, Mapping>* covering(uint64_t address) {
  const auto& mappings = tables().mappings;
  auto after = mappings.upper_bound(address);
  if (after == mappings.begin()) return nullptr;
  --after;
  return address < after->first + after->second.bytes ? &*after : nullptr;
}

CUmemHandle keep(std::shared_ptr<Physical> memory) {
  const CUmemHandle handle = tables().next_handle++;
  tables().handles[handle] = std::move(memory);
  return handle;
}

bool wholePages(uint64_t address, uint64_t bytes) {
  return bytes > 0 && address % kGranularity == 0 && bytes % kGranularity == 0;
}

}  // namespace

bool isDeviceAddress(uint64_t address) {
  return address >= windows().start && address < windows().end();
}

std::byte* alias(uint64_t address) {
  return reinterpret_cast<std::byte*>(isDeviceAddress(address) ? address + kWindowBytes : address);
}

CUresult reserve(uint64_t& address, uint64_t bytes) {
  if (!wholePages(0, bytes)) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard guard(tables().lock);
  if (bytes > windows().end() - windows().next) return CUDA_ERROR_OUT_OF_MEMORY;
  address = windows().next;
  windows().next += bytes;
  tables().reserved[address] = bytes;
  return CUDA_SUCCESS;
}

CUresult unreserve(uint64_t address, uint64_t bytes) {
  const std::lock_guard guard(tables().lock);
  const auto found = tables().reserved.find(address);
  if (found == tables().reserved.end() || found->second != bytes) return CUDA_ERROR_INVALID_VALUE;
  const auto next = tables().mappings.lower_bound(address);
  if (next != tables().mappings.end() && next->first < address + bytes) {
    return CUDA_ERROR_INVALID_VALUE;  // still mapped
  }
  tables().reserved.erase(found);
  return CUDA_SUCCESS;
}

CUresult createMemory(CUmemHandle& handle, uint64_t bytes, int device) {
  if (!wholePages(0, bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (!take(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  char name[32];
  std::snprintf(name, sizeof name, "standin-device-%d", device);
  const int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    if (fd >= 0) close(fd);
    giveBack(device, bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  auto memory = std::shared_ptr<Physical>(new Physical{fd, bytes, device, true});
  const std::lock_guard guard(tables().lock);
  handle = keep(std::move(memory));
  return CUDA_SUCCESS;
}

CUresult releaseMemory(CUmemHandle handle) {
  std::shared_ptr<Physical> last;  // closed outside of the lock
  const std::lock_guard guard(tables().lock);
  const auto found = tables().handles.find(handle);
  if (found == tables().handles.end()) return CUDA_ERROR_INVALID_VALUE;
  last = std::move(found->second);
  tables().handles.erase(found);
  return CUDA_SUCCESS;
}

CUresult map(uint64_t address, uint64_t bytes, uint64_t offset, CUmemHandle handle) {
  const std::lock_guard guard(tables().lock);
  const auto found = tables().handles.find(handle);
  if (found == tables().handles.end() || !wholePages(address, bytes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto memory = found->second;
  if (offset % kGranularity != 0 || offset > memory->bytes || bytes > memory->bytes - offset) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto range = tables().reserved.upper_bound(address);
  if (range == tables().reserved.begin()) return CUDA_ERROR_INVALID_VALUE;
  --range;
  const uint64_t end = range->first + range->second;
  if (address >= end || bytes > end - address) return CUDA_ERROR_INVALID_VALUE;
  if (covering(address) != nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto next = tables().mappings.lower_bound(address);
  if (next != tables().mappings.end() && next->first < address + bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (mmap(aliasPointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd,
           static_cast<off_t>(offset)) == MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  tables().mappings[address] = {bytes, memory,
                                std::vector<int>(static_cast<size_t>(config().devices), 0)};
  return CUDA_SUCCESS;
}

CUresult unmap(uint64_t address, uint64_t bytes) {
  std::vector<std::shared_ptr<Physical>> last;
  const std::lock_guard guard(tables().lock);
  const uint64_t end = address + bytes;
  auto& mappings = tables().mappings;
  uint64_t covered = 0;
  for (auto at = mappings.lower_bound(address); at != mappings.end() && at->first < end; ++at) {
    covered += at->second.bytes;
  }
  if (bytes == 0 || covered != bytes) return CUDA_ERROR_INVALID_VALUE;  // not whole mappings
  for (auto at = mappings.lower_bound(address); at != mappings.end() && at->first < end;) {
    last.push_back(std::move(at->second.memory));
    at = mappings.erase(at);
  }
  mmap(aliasPointer(address), bytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  checker().forget(address, bytes);
  return CUDA_SUCCESS;
}

CUresult setAccess(uint64_t address, uint64_t bytes, const CUmemAccessDesc* wanted, size_t count) {
  const std::lock_guard guard(tables().lock);
  uint64_t at = address;
  while (at < address + bytes) {
    const auto* found = covering(at);
    if (found == nullptr || found->first != at) return CUDA_ERROR_INVALID_VALUE;
    auto& mapping = tables().mappings[at];
    for (size_t i = 0; i < count; ++i) {
      const auto [type, device] = wanted[i].location;
      if (type != kLocationDevice || device < 0 || device >= config().devices) {
        return CUDA_ERROR_INVALID_DEVICE;
      }
      mapping.access[static_cast<size_t>(device)] = wanted[i].flags;
    }
    mprotect(aliasPointer(at), mapping.bytes, PROT_READ | PROT_WRITE);
    at += mapping.bytes;
  }
  return CUDA_SUCCESS;
}

CUresult exportMemory(int& fd, CUmemHandle handle) {
  const std::lock_guard guard(tables().lock);
  const auto found = tables().handles.find(handle);
  if (found == tables().handles.end()) return CUDA_ERROR_INVALID_VALUE;
  fd = fcntl(found->second->fd, F_DUPFD_CLOEXEC, 0);
  return fd < 0 ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

CUresult importMemory(CUmemHandle& handle, int fd) {
  struct stat facts{};
  char link[64];
  char name[64] = "";
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, name, sizeof name - 1);
  int device = -1;
  if (length <= 0 || std::sscanf(name, "/memfd:standin-device-%d", &device) != 1 ||
      fstat(fd, &facts) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) return CUDA_ERROR_UNKNOWN;
  const std::lock_guard guard(tables().lock);
  handle = keep(std::shared_ptr<Physical>(
      new Physical{own, static_cast<uint64_t>(facts.st_size), device, false}));
  return CUDA_SUCCESS;
}

int holderOf(uint64_t address) {
  const std::lock_guard guard(tables().lock);
  const auto* found = covering(address);
  return found == nullptr ? -1 : found->second.memory->device;
}

bool mayUse(int device, uint64_t address, uint64_t bytes, bool writes) {
  const std::lock_guard guard(tables().lock);
  const int needed = writes ? kAccessReadWrite : kAccessRead;
  for (uint64_t at = address; at < address + bytes;) {
    const auto* found = covering(at);
    if (found == nullptr) return false;
    if ((found->second.access[static_cast<size_t>(device)] & needed) != needed) return false;
    at = found->first + found->second.bytes;
  }
  return true;
}

uint64_t livingHandles() {
  const std::lock_guard guard(tables().lock);
  return tables().handles.size();
}

uint64_t livingMappings() {
  const std::lock_guard guard(tables().lock);
  return tables().mappings.size();
}

}  // namespace standin
