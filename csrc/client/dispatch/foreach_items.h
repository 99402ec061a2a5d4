// Calls that are many small ones: `_foreach_` and fused optimizers take lists whose items have
// nothing to do with each other. Where a lease has several devices, each item is done where it is;
// and no call has more items than fit its device well.
#pragma once

#include <ATen/core/stack.h>

#include "client/call/operator_info.h"

namespace shoal::client {

// Runs the call in parts and puts its results in the arguments' place. False if all items belong
// together: then it is a call like any other.
bool splitItems(const OperatorInfo& info, torch::jit::Stack* stack);

}  // namespace shoal::client
