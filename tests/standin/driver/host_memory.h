// Host memory that the driver knows: only copies of it are asynchronous.
#pragma once

#include <cstdint>

#include "cuda_types.h"

namespace standin {

CUresult registerHost(uint64_t address, uint64_t bytes);
CUresult unregisterHost(uint64_t address);
bool isRegistered(uint64_t address, uint64_t bytes);
uint64_t registeredBytes();

}  // namespace standin
