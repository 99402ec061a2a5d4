// The driver functions that the torch backend calls. Shoal finds its own by name.
#pragma once

#include "cuda_types.h"

extern "C" {
CUresult cuInit(unsigned int flags);
CUresult cuGetErrorString(CUresult error, const char** text);
CUresult cuDevicePrimaryCtxRetain(void** context, CUdevice device);
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int* flags, int* active);
CUresult cuCtxSetCurrent(void* context);
CUresult cuCtxSynchronize();
CUresult cuStreamCreateWithPriority(void** stream, unsigned int flags, int priority);
CUresult cuStreamSynchronize(void* stream);
CUresult cuStreamQuery(void* stream);
CUresult cuStreamWaitEvent(void* stream, void* event, unsigned int flags);
CUresult cuEventCreate(void** event, unsigned int flags);
CUresult cuEventDestroy_v2(void* event);
CUresult cuEventRecord(void* event, void* stream);
CUresult cuEventQuery(void* event);
CUresult cuEventSynchronize(void* event);
CUresult cuEventElapsedTime_v2(float* ms, void* start, void* end);
CUresult cuMemGetInfo_v2(size_t* free, size_t* total);
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment,
                             CUdeviceptr wanted, unsigned long long flags);
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes);
CUresult cuMemCreate(CUmemHandle* handle, size_t bytes, const CUmemAllocationProp* wanted,
                     unsigned long long flags);
CUresult cuMemRelease(CUmemHandle handle);
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemHandle handle,
                  unsigned long long flags);
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes);
CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* wanted,
                        size_t count);
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, void* stream);
CUresult cuMemHostAlloc(void** host, size_t bytes, unsigned int flags);
CUresult cuMemFreeHost(void* host);
CUresult cuPointerGetAttribute(void* data, int attribute, CUdeviceptr address);
}
