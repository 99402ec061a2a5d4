// The outputs' metadata of a call that was never made before, without asking the worker: torch's
// own C++ shape functions where the operator has them, a few rules of ours where it has not.
#pragma once

#include <ATen/core/stack.h>

#include <vector>

#include "client/call/operator_info.h"
#include "client/member/call_cache.h"

namespace shoal::client {

// An operator was reached while another one's shapes are inferred. Outputs stay as they are.
void reachedWhileInferring(const OperatorInfo& info, torch::jit::Stack* stack);

// Fills `outputs` and returns true if they are certain. Raises what local torch would raise for
// these shapes. `arguments` is the call's stack.
bool inferOutputs(const OperatorInfo& info, c10::ArrayRef<c10::IValue> arguments,
                  std::vector<OutputMeta>& outputs);

OutputMeta metaOf(const at::Tensor& tensor);

}  // namespace shoal::client
