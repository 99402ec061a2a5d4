#pragma once

namespace torch {
class Library;
}

namespace shoal::client {

// The kernels that describe tensors or copy them, and the device guard: registerHooks() calls
// these.
void registerViews(torch::Library& device, torch::Library& autograd);
void registerCopies(torch::Library& device);
void registerGuard();

// Registers a kernel for every operator that goes to the worker. Done at first use, because it
// takes some milliseconds that `import torch` should not pay.
void registerKernels();
// Registers the lists of operators that autocast treats.
void registerAutocast();

}  // namespace shoal::client
