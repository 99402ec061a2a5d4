// Operators on tensors that are larger than any device: they run by parts, each where its rows are.
#pragma once

#include <ATen/core/stack.h>

#include "client/call/operator_info.h"
#include "client/member/call_cache.h"
#include "client/space/session.h"

namespace shoal::client {

// Runs a call that has operands on sharded segments, and puts its results in the arguments' place.
// False if it has none: then it is a call like any other.
bool runSharded(const OperatorInfo& info, torch::jit::Stack* stack);

// Runs a call whose results are too large for a device although its operands are not.
void runShardedResult(const OperatorInfo& info, torch::jit::Stack* stack, Session& session,
                      const std::vector<OutputMeta>& outputs);

}  // namespace shoal::client
