// The way of an operator from torch's dispatcher into the op stream: as one call, or as several
// where its lists lie on several members or its tensors are larger than any device.
#pragma once

#include <ATen/core/stack.h>

#include "client/call/operator_info.h"
#include "client/member/member.h"

namespace shoal::client {

// Replaces the call's arguments on the stack by its results.
void dispatchCall(const OperatorInfo& info, torch::jit::Stack* stack);

// The same as one call on one device, for callers that have divided it already.
void dispatchWhole(const OperatorInfo& info, torch::jit::Stack* stack);

// The same for an operator whose autograd graph the worker keeps under `graph`. Returns the member
// that keeps it.
const Member& dispatchWithWorkerGraph(const OperatorInfo& info, torch::jit::Stack* stack,
                                      uint64_t graph);

}  // namespace shoal::client
