// The functions of CUDA's driver library that Shoal uses beyond torch, loaded at run time: neither
// CUDA's headers nor its libraries are needed to build Shoal. Types are those that cuda.h
// documents.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace shoal::worker {

struct CudaDriver {
  // The library, loaded at first use: $SHOAL_CUDA_DRIVER, else libcuda.so.1. Null if there is none.
  static const CudaDriver* get();

  int (*cuInit)(unsigned flags);
  int (*cuDeviceGet)(int* device, int ordinal);
  int (*cuDeviceGetName)(char* name, int bytes, int device);
  int (*cuDeviceGetAttribute)(int* value, int attribute, int device);
  int (*cuGetErrorString)(int error, const char** text);
  int (*cuMemHostRegister_v2)(void* host, size_t bytes, unsigned flags);
  int (*cuMemHostUnregister)(void* host);
};

struct CudaFacts {
  std::string name;
  int major = 0, minor = 0;  // of its compute capability
};
// What the driver says of a device. An empty name: there is no such driver, or it does not say.
CudaFacts cudaFacts(int ordinal);

// Registers host memory with the calling thread's context. Returns false if the driver refuses, or
// if there is none.
bool cudaRegisterHost(void* host, uint64_t bytes);
void cudaUnregisterHost(void* host);

}  // namespace shoal::worker
