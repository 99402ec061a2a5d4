// Memory of devices and registered memory of the host.
#include <sys/mman.h>

#include <cstdint>
#include <map>
#include <mutex>

#include "config.h"
#include "context.h"
#include "device_memory.h"
#include "host_memory.h"
#include "shared_state.h"

using namespace standin;

STANDIN_API CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  STANDIN_ENTER(kContext);
  *total = config().memory_bytes;
  const uint64_t used = usedBytes(currentDevice());
  *free = used < *total ? *total - used : 0;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp* wanted,
                                                   int option) {
  STANDIN_ENTER(kInit);
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment,
                                         CUdeviceptr wanted, unsigned long long flags) {
  STANDIN_ENTER(kContext, bytes);
  uint64_t found = 0;
  const CUresult result = reserve(found, bytes);
  *address = found;
  return result;
}

STANDIN_API CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  STANDIN_ENTER(kInit, address, bytes);
  return unreserve(address, bytes);
}

STANDIN_API CUresult cuMemCreate(CUmemHandle* handle, size_t bytes,
                                 const CUmemAllocationProp* wanted, unsigned long long flags) {
  STANDIN_ENTER(kContext, bytes);
  const int device = wanted->location.id;
  if (wanted->type != 1 || wanted->location.type != kLocationDevice || device < 0 ||
      device >= config().devices) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return createMemory(*handle, bytes, device);
}

STANDIN_API CUresult cuMemRelease(CUmemHandle handle) {
  STANDIN_ENTER(kInit, handle);
  return releaseMemory(handle);
}

STANDIN_API CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemHandle handle,
                              unsigned long long flags) {
  STANDIN_ENTER(kContext, address, bytes, offset, handle);
  return map(address, bytes, offset, handle);
}

STANDIN_API CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  STANDIN_ENTER(kInit, address, bytes);
  return unmap(address, bytes);
}

STANDIN_API CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes,
                                    const CUmemAccessDesc* wanted, size_t count) {
  STANDIN_ENTER(kContext, address, bytes, count);
  return setAccess(address, bytes, wanted, count);
}

STANDIN_API CUresult cuMemExportToShareableHandle(void* to, CUmemHandle handle, int type,
                                                  unsigned long long flags) {
  STANDIN_ENTER(kContext, handle);
  if (type != kHandlePosixFd) return CUDA_ERROR_NOT_SUPPORTED;
  return exportMemory(*static_cast<int*>(to), handle);
}

STANDIN_API CUresult cuMemImportFromShareableHandle(CUmemHandle* handle, void* from, int type) {
  STANDIN_ENTER(kContext);
  if (type != kHandlePosixFd) return CUDA_ERROR_NOT_SUPPORTED;
  // As the driver takes it: the descriptor itself, in a pointer.
  return importMemory(*handle, static_cast<int>(reinterpret_cast<intptr_t>(from)));
}

STANDIN_API CUresult cuMemHostRegister_v2(void* host, size_t bytes, unsigned int flags) {
  STANDIN_ENTER(kContext, host, bytes);
  return registerHost(reinterpret_cast<uint64_t>(host), bytes);
}

STANDIN_API CUresult cuMemHostUnregister(void* host) {
  STANDIN_ENTER(kContext, host);
  return unregisterHost(reinterpret_cast<uint64_t>(host));
}

STANDIN_API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* address, void* host,
                                                  unsigned int flags) {
  STANDIN_ENTER(kContext, host);
  *address = reinterpret_cast<CUdeviceptr>(host);  // unified addressing
  return isRegistered(*address, 1) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

namespace {

// Blocks of cuMemAlloc and cuMemHostAlloc, with what frees them.
struct Block {
  uint64_t bytes;
  CUmemHandle handle;
};

struct Blocks {
  std::mutex lock;
  std::map<uint64_t, Block> device;
  std::map<uint64_t, uint64_t> host;
};

Blocks& blocks() {
  static auto* const made = new Blocks;
  return *made;
}

}  // namespace

STANDIN_API CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t wanted) {
  STANDIN_ENTER(kContext, wanted);
  const uint64_t bytes = (wanted + kGranularity - 1) / kGranularity * kGranularity;
  uint64_t at = 0;
  Block block{bytes, 0};
  if (const CUresult failed = createMemory(block.handle, bytes, currentDevice())) return failed;
  CUresult failed = reserve(at, bytes);
  if (failed == CUDA_SUCCESS) failed = map(at, bytes, 0, block.handle);
  const CUmemAccessDesc access{{kLocationDevice, currentDevice()}, kAccessReadWrite};
  if (failed == CUDA_SUCCESS) failed = setAccess(at, bytes, &access, 1);
  if (failed != CUDA_SUCCESS) {
    releaseMemory(block.handle);
    return failed;
  }
  const std::lock_guard guard(blocks().lock);
  blocks().device[at] = block;
  *address = at;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuMemFree_v2(CUdeviceptr address) {
  STANDIN_ENTER(kContext, address);
  engine().waitForDevice(currentDevice());  // as the driver's
  const std::lock_guard guard(blocks().lock);
  const auto found = blocks().device.find(address);
  if (found == blocks().device.end()) return CUDA_ERROR_INVALID_VALUE;
  unmap(address, found->second.bytes);
  unreserve(address, found->second.bytes);
  releaseMemory(found->second.handle);
  blocks().device.erase(found);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuMemHostAlloc(void** host, size_t bytes, unsigned int flags) {
  STANDIN_ENTER(kContext, bytes);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *host = memory;
  const std::lock_guard guard(blocks().lock);
  blocks().host[reinterpret_cast<uint64_t>(memory)] = bytes;
  return registerHost(reinterpret_cast<uint64_t>(memory), bytes);
}

STANDIN_API CUresult cuMemFreeHost(void* host) {
  STANDIN_ENTER(kContext, host);
  const std::lock_guard guard(blocks().lock);
  const auto found = blocks().host.find(reinterpret_cast<uint64_t>(host));
  if (found == blocks().host.end()) return CUDA_ERROR_INVALID_VALUE;
  unregisterHost(found->first);
  munmap(host, found->second);
  blocks().host.erase(found);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuPointerGetAttribute(void* data, int attribute, CUdeviceptr address) {
  STANDIN_ENTER(kContext, attribute, address);
  const int holder = holderOf(address);
  if (holder < 0 && !isRegistered(address, 1)) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case 2:  // memory type: 1 host, 2 device
      *static_cast<unsigned int*>(data) = holder < 0 ? 1 : 2;
      return CUDA_SUCCESS;
    case 9:  // ordinal
      *static_cast<int*>(data) = holder < 0 ? currentDevice() : holder;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}
