// The outputs' metadata of a call that was never made before, without asking the worker: torch's
// own C++ shape functions where the operator has them, a few rules of ours where it has not.
#pragma once

#include <ATen/core/stack.h>

#include <vector>

#include "client/call/operator_info.h"
#include "client/member/call_cache.h"

namespace shoal::client {

// While an Inference is alive on a thread, kernels of the device allocate nothing and send nothing.
class Inference {
 public:
  Inference() { ++depth_; }
  ~Inference() { --depth_; }
  static bool active() { return depth_ > 0; }
  // An operator was reached while inferring. Outputs stay as they are.
  static void reached(const OperatorInfo& info, torch::jit::Stack* stack);

 private:
  static thread_local int depth_;
};

// Fills `outputs` and returns true if they are certain. Raises what local torch would raise for
// these shapes. `arguments` is the call's stack.
bool inferOutputs(const OperatorInfo& info, c10::ArrayRef<c10::IValue> arguments,
                  std::vector<OutputMeta>& outputs);

OutputMeta metaOf(const at::Tensor& tensor);

}  // namespace shoal::client
