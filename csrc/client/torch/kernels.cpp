// Which operators go to the worker whole. The rule: everything that computes. What only describes
// (views, empty tensors), what asks about a tensor, and what torch composes of other operators with
// a gradient of its own (CompositeImplicit) stays with the client.
#include "client/torch/kernels.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "client/call/operator_info.h"
#include "client/dispatch/dispatch.h"

namespace shoal::client {
namespace {

using c10::DispatchKey;

class ForwardKernel final : public c10::OperatorKernel {
 public:
  explicit ForwardKernel(const c10::OperatorHandle& op) : info_(op) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    dispatchCall(info_, stack);
  }

 private:
  const OperatorInfo info_;
};

// Kernels of torch that are right for this device as they are. By name, all overloads.
const std::unordered_set<std::string>& localOperators() {
  static const std::unordered_set<std::string> names = {
      // change or ask a tensor's description
      "t_",
      "transpose_",
      "squeeze_",
      "unsqueeze_",
      "detach_",
      "as_strided_",
      "resize_as_",
      "resize",
      "resize_as",
      "set",
      "is_pinned",
      "_pin_memory",
      "is_same_size",
      "_has_same_storage_numel",
      "is_coalesced",
      "sparse_dim",
      "dense_dim",
      "_assert_tensor_metadata",
      "_print",
      "_assert_scalar",
      "_functional_assert_scalar",
      "_functional_sym_constrain_range",
      "sym_constrain_range",
      "sym_constrain_range_for_size",
      "_functional_sym_constrain_range_for_size",
      "_coalesced_",
      // share memory without saying so in their schema
      "_unsafe_view",
      "unsafe_split",
      "unsafe_split_with_sizes",
      "_lazy_clone",
      // may make their result on another device than their argument's
      "empty_like",
      "new_empty",
      "new_empty_strided",
      "empty_permuted",
      "_to_copy",
      "new_full",
      "new_zeros",
      "new_ones",
      "zeros_like",
      "ones_like",
      "full_like",
      "rand_like",
      "randn_like",
      "randint_like",
      "scalar_tensor",
      "lift",
      "_new_zeros_with_same_feature_meta",
      // raise what they find, which must happen in the caller's line
      "_linalg_check_errors",
      "_assert_async",
      // work with lengths on the CPU
      "_pack_padded_sequence",
      "_pack_padded_sequence_backward",
  };
  return names;
}

bool returnsTensorsOnly(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    const auto kind = result.type()->kind();
    if (kind == c10::TypeKind::TensorType) continue;
    if (kind == c10::TypeKind::ListType &&
        result.type()->containedType(0)->kind() == c10::TypeKind::TensorType) {
      continue;
    }
    return false;
  }
  return true;
}

bool isView(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    if (argument.alias_info() != nullptr && !argument.alias_info()->isWrite()) return true;
  }
  return false;
}

bool isForwarded(const c10::OperatorHandle& op) {
  const std::string name = op.operator_name().name.substr(6);  // after "aten::"
  if (localOperators().count(name) > 0 || isView(op.schema())) return false;
  if (op.hasKernelForDispatchKey(DispatchKey::PrivateUse1)) return false;
  if (op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)) return false;
  const bool composite =
      op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
      op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
  return returnsTensorsOnly(op.schema()) || !composite;
}

// Operators of other libraries, and whatever was registered after us.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<std::string, std::unique_ptr<OperatorInfo>>;
  const OperatorInfo* info;
  {
    const std::lock_guard lock(mutex);
    auto& entry = (*known)[c10::toString(op.operator_name())];
    if (entry == nullptr) entry = std::make_unique<OperatorInfo>(op);
    info = entry.get();
  }
  dispatchCall(*info, stack);
}

// Tensors that are no plain array of numbers have no address. Their factories end up here.
void refuseLayout(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, c10::toString(op.operator_name()),
      ": shoal devices hold dense strided tensors only. Use .to_dense(), or "
      "keep sparse, nested and quantized tensors on the CPU.");
}

}  // namespace

void registerKernels() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1,
                                            __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op.has_value() || !isForwarded(*op)) continue;
    library->impl(c10::toString(name).c_str(),
                  torch::CppFunction::makeFromBoxedFunctor(std::make_unique<ForwardKernel>(*op)));
  }
  static auto* others =
      new torch::Library(torch::Library::IMPL, "_", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  others->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  for (const auto key : {DispatchKey::SparsePrivateUse1, DispatchKey::SparseCsrPrivateUse1,
                         DispatchKey::QuantizedPrivateUse1, DispatchKey::NestedTensorPrivateUse1}) {
    auto* layouts = new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
    layouts->fallback(torch::CppFunction::makeFromBoxedFunction<&refuseLayout>());
  }
}

}  // namespace shoal::client
