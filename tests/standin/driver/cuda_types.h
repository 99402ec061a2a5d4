// The driver API's types and constants that the stand-in needs, with the ABI of CUDA 13. They stand
// here so that the stand-in builds without a CUDA toolkit.
#pragma once

#include <cstddef>
#include <cstdint>

using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUmemHandle = unsigned long long;

enum CUresult : int {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_ILLEGAL_ADDRESS = 700,
  CUDA_ERROR_ASSERT = 710,
  CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
  CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_UNKNOWN = 999,
};

struct CUmemLocation {
  int type;  // 1: device
  int id;
};
constexpr int kLocationDevice = 1;
constexpr int kHandlePosixFd = 1;
constexpr int kAccessRead = 1;
constexpr int kAccessReadWrite = 3;

struct CUmemAllocationProp {
  int type;  // 1: pinned
  int requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};
static_assert(sizeof(CUmemAllocationProp) == 32);

struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
};
static_assert(sizeof(CUmemAccessDesc) == 12);

struct CUuuid {
  char bytes[16];
};

using CUhostFn = void (*)(void*);
