// Operators that torch would decompose into many small ones for a new device, but that the worker's
// torch runs as one fused kernel: recurrent layers. They go to the worker whole; it keeps the
// autograd graph and runs its backward when ours reaches it.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "client/call/operator_info.h"

namespace shoal::client {

void dispatchWithGraph(const OperatorInfo& info, torch::jit::Stack* stack);

}  // namespace shoal::client
