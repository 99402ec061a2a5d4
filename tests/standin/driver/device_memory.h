// Device memory: a memfd behind an address that the host cannot touch. Kernels of this process find
// the same bytes at that address plus a constant, which nothing else knows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_types.h"

namespace standin {

constexpr uint64_t kGranularity = 2ULL << 20;

bool isDeviceAddress(uint64_t address);
// Where a kernel finds the byte; a host address is its own.
std::byte* alias(uint64_t address);

CUresult reserve(uint64_t& address, uint64_t bytes);
CUresult unreserve(uint64_t address, uint64_t bytes);
CUresult createMemory(CUmemHandle& handle, uint64_t bytes, int device);
CUresult releaseMemory(CUmemHandle handle);
CUresult map(uint64_t address, uint64_t bytes, uint64_t offset, CUmemHandle handle);
CUresult unmap(uint64_t address, uint64_t bytes);
CUresult setAccess(uint64_t address, uint64_t bytes, const CUmemAccessDesc* wanted, size_t count);
CUresult exportMemory(int& fd, CUmemHandle handle);
CUresult importMemory(CUmemHandle& handle, int fd);

// The device that holds the memory at an address; -1: nothing is mapped there.
int holderOf(uint64_t address);
// Whether kernels of the device may use the range.
bool mayUse(int device, uint64_t address, uint64_t bytes, bool writes);
// Handles and mappings that are alive, to find leaks.
uint64_t livingHandles();
uint64_t livingMappings();

}  // namespace standin
