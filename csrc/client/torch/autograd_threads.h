// Threads of torch's autograd engine for devices that appear after its first backward pass.
#pragma once

#include <c10/core/Device.h>

namespace shoal::client {

// Torch starts one thread for each device that exists at the program's first backward pass, and
// never another. This starts those that are missing for `count` devices. It does nothing before the
// first backward pass, for torch will then start them itself. No backward pass on an accelerator
// may run meanwhile.
void startAutogradThreads(c10::DeviceIndex count);

}  // namespace shoal::client
