// The program's settings of torch, in force at the worker.
#pragma once

#include "wire/settings.h"

namespace shoal::worker {

// Sets this process's torch, and the calling thread's mode of the processor. What this machine's
// torch does not have (cuSOLVER on a CPU device, …) stays as it is.
void applySettings(const wire::Settings& settings);

}  // namespace shoal::worker
