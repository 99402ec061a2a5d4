#include "client/call/output_shapes.h"

#include <ATen/core/Tensor.h>

#include "client/call/shape_rules.h"
#include "client/tensor/shape_inference.h"
#include "wire/layout.h"

namespace shoal::client {

namespace {

// Behind this key stand torch's generic kernels of structured operators: they compute the outputs'
// shapes in C++, allocate them on the inputs' device and then call the `out=` overload there, which
// is where ShapeInference stops them.
constexpr auto kGenericKey = c10::DispatchKey::CompositeExplicitAutogradNonFunctional;

struct Unreachable {};

bool inferStructured(const OperatorInfo& info, c10::ArrayRef<c10::IValue> arguments,
                     std::vector<OutputMeta>& outputs) {
  torch::jit::Stack stack(arguments.begin(), arguments.end());
  try {
    const ShapeInference inferring;
    info.op.callBoxedForDispatchKey(kGenericKey, stack);
  } catch (const Unreachable&) {
    return false;
  }
  for (size_t i = 0; i < stack.size(); ++i) {
    if (!stack[i].isTensor()) return false;
    if (info.return_of[i] >= 0) {
      outputs.push_back(
          {wire::OutputKind::kArgument, {}, static_cast<uint32_t>(info.return_of[i])});
    } else {
      outputs.push_back(metaOf(stack[i].toTensor()));
    }
  }
  return true;
}

// Whether one of the indices is a mask, whose true elements decide the result's shape.
bool hasMaskIndex(c10::ArrayRef<c10::IValue> arguments) {
  for (const auto& argument : arguments) {
    if (!argument.isList() || argument.isIntList()) continue;
    for (const c10::IValue& item : argument.toListRef()) {
      if (!item.isTensor() || !item.toTensor().defined()) continue;
      const auto dtype = item.toTensor().scalar_type();
      if (dtype == at::kBool || dtype == at::kByte) return true;
    }
  }
  return false;
}

}  // namespace

OutputMeta metaOf(const at::Tensor& tensor) {
  OutputMeta meta;
  if (!tensor.defined()) {
    meta.kind = wire::OutputKind::kUndefined;
    return meta;
  }
  meta.dtype = tensor.scalar_type();
  meta.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  meta.strides.assign(tensor.strides().begin(), tensor.strides().end());
  meta.bytes = static_cast<uint64_t>(wire::spanBytes(meta.sizes.data(), meta.strides.data(),
                                                     meta.sizes.size(), tensor.itemsize()));
  return meta;
}

void reachedWhileInferring(const OperatorInfo& info, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, info.argument_count);
  torch::jit::Stack results;
  for (const int source : info.return_of) {
    if (source < 0) throw Unreachable();
    results.push_back(arguments[static_cast<size_t>(source)]);
  }
  torch::jit::drop(*stack, info.argument_count);
  for (auto& result : results) stack->push_back(std::move(result));
}

bool inferOutputs(const OperatorInfo& info, c10::ArrayRef<c10::IValue> arguments,
                  std::vector<OutputMeta>& outputs) {
  outputs.clear();
  if (info.has_out) return false;
  if (info.structured && !(info.takes_host_index && hasMaskIndex(arguments))) {
    if (inferStructured(info, arguments, outputs)) return true;
    outputs.clear();
  }
  if (info.writes_only) {
    for (const int source : info.return_of) {
      outputs.push_back({wire::OutputKind::kArgument, {}, static_cast<uint32_t>(source)});
    }
    return true;
  }
  if (info.dynamic) return false;
  return applyShapeRule(info.name, arguments, outputs);
}

}  // namespace shoal::client
