// The way of an operator from torch's dispatcher into the op stream.
#pragma once

#include <ATen/core/stack.h>

#include "client/operator_info.h"

namespace shoal::client {

// Replaces the call's arguments on the stack by its results.
void dispatchCall(const OperatorInfo& info, torch::jit::Stack* stack);

// The same for an operator whose autograd graph the worker keeps under `graph`. Needs gradients of
// exactly those tensors that require them.
void dispatchRecorded(const OperatorInfo& info, torch::jit::Stack* stack, uint64_t graph);

// SHOAL_BLOCKING=1: every call waits for its result, so errors appear where they happen.
void setBlocking(bool blocking);

}  // namespace shoal::client
