#pragma once

namespace shoal::client {

// Registers a kernel for every operator that goes to the worker. Done at first use, because it
// takes some milliseconds that `import torch` should not pay.
void registerKernels();
// Registers the lists of operators that autocast treats.
void registerAutocast();

}  // namespace shoal::client
