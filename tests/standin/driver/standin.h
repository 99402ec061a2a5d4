// What the torch backend uses of the driver beyond the driver API: launching host code as a kernel.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "checker.h"
#include "cuda_types.h"

#define STANDIN_EXPORT __attribute__((visibility("default")))

namespace standin {

// Queues `run` on the stream. It may use the accesses' memory, through `aliasOf`, and no other.
STANDIN_EXPORT CUresult launch(void* stream, const std::string& name, std::vector<Access> accesses,
                               std::function<void()> run);
STANDIN_EXPORT std::byte* aliasOf(const void* address);
STANDIN_EXPORT bool isRegisteredHost(const void* address, uint64_t bytes);
STANDIN_EXPORT std::string errorText(CUresult error);
STANDIN_EXPORT int deviceCount();

}  // namespace standin
