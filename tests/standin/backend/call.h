// One operator call as the fallback sees it: its stack, and the tensors in it, in order.
#pragma once

#include "backend.h"

namespace standin {

struct Argument {
  at::Tensor tensor;
  bool writes;
};

// What a call returns and changes, but for values: the same for all calls with the same key.
struct Output {
  enum Kind { kNone, kFresh, kArgument, kView, kList, kValue } kind = kNone;
  size_t number = 0;  // of the argument; how many items follow in a list
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;  // of a view, behind its base's
  c10::IValue value;
};

struct Reshaped {
  size_t number;
  std::vector<int64_t> sizes, strides;
};

struct Outline {
  bool unknown = false;  // made-up values do not do: run it on the real ones
  std::vector<Output> outputs;
  std::vector<Reshaped> reshaped;
};

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack arguments);

  const c10::OperatorHandle& op() const { return op_; }
  const std::string& name() const { return op_.schema().name(); }
  c10::DeviceIndex device() const { return device_; }
  const std::vector<Argument>& arguments() const { return tensors_; }
  // Everything that decides an outline: operator, layouts, and the other arguments.
  std::string key() const;
  // The stack with each device tensor replaced; CPU tensors and generators are CPU ones of their
  // own.
  torch::jit::Stack on(const std::function<at::Tensor(const at::Tensor&)>& replaced,
                       const std::optional<at::Generator>& generator) const;
  std::vector<Access> accesses() const;
  // Whether what it returns depends on values: it must wait for them, as on CUDA.
  bool dependsOnValues() const;
  bool draws() const { return op_.hasTag(at::Tag::nondeterministic_seeded); }
  std::optional<at::Generator> generator() const;
  // Makes what the call returns. `made`: the device tensors that are new, in order.
  torch::jit::Stack results(const Outline& outline, std::vector<at::Tensor>& made) const;

 private:
  void find(const c10::IValue& value, bool writes);
  at::Tensor result(const Output& output, std::vector<at::Tensor>& made) const;

  const c10::OperatorHandle& op_;
  torch::jit::Stack stack_;
  std::vector<Argument> tensors_;  // on the device
  c10::DeviceIndex device_ = -1;
};

// outline.cpp. Runs the call once on zeros, on the CPU.
const Outline& outlineOf(const Call& call);
// From what a real run returned.
Outline outlineFrom(const Call& call, const torch::jit::Stack& results,
                    const std::vector<at::Tensor>& stood_for);
// The tensors among results that are new, in order.
std::vector<at::Tensor> freshOf(const Outline& outline, const torch::jit::Stack& results);

// The thread's state for computing on the CPU: no autograd, and the numbers that a seed gives.
class OnCpu {
 public:
  explicit OnCpu(int threads);

 private:
  c10::impl::ExcludeDispatchKeyGuard no_autocast_;
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
};
// Runs the operator; random ones draw from `seed` if it is there.
void invoke(const c10::OperatorHandle& op, torch::jit::Stack& stack,
            const std::optional<uint64_t>& seed);

}  // namespace standin
