#pragma once

namespace shoal::client {

// Makes the device known to torch: hooks and allocator. No session is started.
void registerHooks();

}  // namespace shoal::client
