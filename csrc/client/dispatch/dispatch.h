// The way of an operator from torch's dispatcher into the op stream.
#pragma once

#include <ATen/core/stack.h>

#include "client/call/operator_info.h"
#include "client/member/member.h"

namespace shoal::client {

// Replaces the call's arguments on the stack by its results.
void dispatchCall(const OperatorInfo& info, torch::jit::Stack* stack);

// The same as one call on one device, for those who have divided it already.
void dispatchWhole(const OperatorInfo& info, torch::jit::Stack* stack);

// The same for an operator whose autograd graph the worker keeps under `graph`. Needs gradients of
// exactly those tensors that require them. Returns the stream of the member that keeps it.
const Stream& dispatchRecorded(const OperatorInfo& info, torch::jit::Stack* stack, uint64_t graph);

// SHOAL_BLOCKING=1: every call waits for its result, so errors appear where they happen.
void setBlocking(bool blocking);

}  // namespace shoal::client
