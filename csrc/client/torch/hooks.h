#pragma once

namespace shoal::client {

// Makes the device known to torch: hooks, allocator, guard and the kernels that need no lease. No
// session is started. A worker never does this: to its torch, the device does not exist.
void registerHooks();

}  // namespace shoal::client
