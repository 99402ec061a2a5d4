// cuInit, devices, contexts, errors, and how to find a function by name.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "config.h"
#include "context.h"
#include "shared_state.h"

using namespace standin;

namespace {

bool exists(int device) {
  return device >= 0 && device < config().devices;
}

void* contextOf(int device) {
  return reinterpret_cast<void*>(static_cast<uintptr_t>(device) + 1);
}
int deviceOf(void* context) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1;
}

int attributeOf(int attribute, int device) {
  switch (attribute) {
    case 1:
      return 1024;  // threads of a block
    case 10:
      return 32;  // warp
    case 13:
      return 1500000;  // clock, kHz
    case 16:
      return 80;  // multiprocessors
    case 33:
      return 0;  // PCI bus
    case 34:
      return device + 1;
    case 35:
      return 0;  // integrated
    case 40:
      return 2;  // asynchronous engines
    case 41:
      return 1;  // unified addressing
    case 50:
      return 0;  // PCI domain
    case 75:
      return 8;  // capability
    case 76:
      return 0;
    case 78:
      return 1;  // stream priorities
    case 102:
      return 1;  // virtual memory management
    case 103:
      return 1;  // handles as POSIX descriptors
    case 19:
    case 91:
    case 93:
    case 94:
    case 122:
      return 1;  // maps host memory; stream memory operations
    default:
      return 0;
  }
}

}  // namespace

STANDIN_API CUresult cuInit(unsigned int flags) {
  STANDIN_ENTER(kNothing, flags);
  return init();
}

STANDIN_API CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDeviceGetCount(int* count) {
  STANDIN_ENTER(kInit);
  *count = config().devices;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  STANDIN_ENTER(kInit, ordinal);
  if (!exists(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  STANDIN_ENTER(kInit, device);
  if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(name, static_cast<size_t>(length), "stand-in %d", device);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  STANDIN_ENTER(kInit, device);
  if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  char text[32] = {};
  std::snprintf(text, sizeof text, "stand-in-%06d", device);
  std::memcpy(uuid->bytes, text, sizeof uuid->bytes);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  STANDIN_ENTER(kInit, device);
  if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = config().memory_bytes;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  STANDIN_ENTER(kInit, attribute, device);
  if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  *value = attributeOf(attribute, device);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  STANDIN_ENTER(kInit, device, peer);
  if (!exists(device) || !exists(peer)) return CUDA_ERROR_INVALID_DEVICE;
  *can = device != peer;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuDevicePrimaryCtxRetain(void** context, CUdevice device) {
  STANDIN_ENTER(kInit, device);
  if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  *context = contextOf(device);
  return retain(device);
}

STANDIN_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  STANDIN_ENTER(kInit, device);
  return exists(device) ? release(device) : CUDA_ERROR_INVALID_DEVICE;
}

STANDIN_API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags) {
  STANDIN_ENTER(kInit, device, flags);
  return exists(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

STANDIN_API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int* flags, int* active) {
  STANDIN_ENTER(kInit, device);
  if (!exists(device)) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = hasContext(device);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuCtxSetCurrent(void* context) {
  STANDIN_ENTER(kInit, deviceOf(context));
  const int device = deviceOf(context);
  if (context != nullptr && (!exists(device) || !hasContext(device))) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  setCurrentDevice(device);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuCtxGetCurrent(void** context) {
  STANDIN_ENTER(kInit);
  *context = currentDevice() < 0 ? nullptr : contextOf(currentDevice());
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuCtxPushCurrent_v2(void* context) {
  return cuCtxSetCurrent(context);
}

STANDIN_API CUresult cuCtxPopCurrent_v2(void** context) {
  STANDIN_ENTER(kContext);
  if (context != nullptr) *context = contextOf(currentDevice());
  setCurrentDevice(-1);
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuCtxGetDevice(CUdevice* device) {
  STANDIN_ENTER(kContext);
  *device = currentDevice();
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  STANDIN_ENTER(kContext);
  *least = 0;
  *greatest = -5;
  return CUDA_SUCCESS;
}

STANDIN_API CUresult cuCtxEnablePeerAccess(void* context, unsigned int flags) {
  STANDIN_ENTER(kContext, deviceOf(context));
  return exists(deviceOf(context)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

STANDIN_API CUresult cuCtxSynchronize() {
  STANDIN_ENTER(kContext);
  return engine().waitForDevice(currentDevice());
}

namespace {

struct Named {
  CUresult error;
  const char* name;
  const char* text;
};

constexpr Named kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS",
     "an illegal memory access was encountered"},
    {CUDA_ERROR_ASSERT, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

CUresult tell(CUresult error, const char** text, const char* Named::* which) {
  for (const Named& named : kErrors) {
    if (named.error != error) continue;
    *text = named.*which;
    return CUDA_SUCCESS;
  }
  *text = nullptr;
  return CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

STANDIN_API CUresult cuGetErrorName(CUresult error, const char** text) {
  return tell(error, text, &Named::name);
}

STANDIN_API CUresult cuGetErrorString(CUresult error, const char** text) {
  return tell(error, text, &Named::text);
}

STANDIN_API CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version,
                                         uint64_t flags, int* status) {
  // A name without a version means the newest that `version` knows.
  Dl_info own;
  *function = nullptr;
  if (dladdr(reinterpret_cast<void*>(&cuInit), &own) == 0) return CUDA_ERROR_UNKNOWN;
  void* library = dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  for (const char* suffix : {"_v4", "_v3", "_v2", ""}) {
    *function = dlsym(library, (std::string(symbol) + suffix).c_str());
    if (*function != nullptr) break;
  }
  dlclose(library);
  if (status != nullptr) *status = *function != nullptr ? 0 : 1;
  return *function != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

STANDIN_API CUresult cuGetProcAddress(const char* symbol, void** function, int version,
                                      uint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, nullptr);
}
