#include "client/call/operator_info.h"

#include <ATen/core/enum_tag.h>
#include <ATen/core/jit_type.h>

namespace shoal::client {
namespace {

bool holdsNumber(const c10::TypePtr& type) {
  using K = c10::TypeKind;
  if (type->kind() == K::NumberType) return true;
  if (type->kind() == K::OptionalType || type->kind() == K::ListType) {
    return holdsNumber(type->containedType(0));
  }
  return false;
}

bool startsWith(const std::string& text, const char* prefix) {
  return text.rfind(prefix, 0) == 0;
}

}  // namespace

OperatorInfo::OperatorInfo(const c10::OperatorHandle& handle) : op(handle) {
  const auto& schema = op.schema();
  name = op.operator_name().name;
  if (!op.operator_name().overload_name.empty()) name += "." + op.operator_name().overload_name;
  argument_count = schema.arguments().size();
  for (const auto& argument : schema.arguments()) {
    is_number.push_back(holdsNumber(argument.real_type()));
    has_out = has_out || argument.is_out();
    // Batch norm changes its running statistics, though some of its schemas do not say so.
    const bool statistics = startsWith(argument.name(), "running_");
    const auto* alias = argument.alias_info();
    writes.push_back(statistics || (alias != nullptr && alias->isWrite()));
    takes_host_tensor = takes_host_tensor || argument.name() == "batch_sizes";
  }
  size_t matched = 0;
  for (const auto& result : schema.returns()) {
    int source = -1;
    for (size_t i = 0; i < argument_count && result.alias_info() != nullptr; ++i) {
      const auto* info = schema.arguments()[i].alias_info();
      if (info != nullptr && info->isWrite() && *info == *result.alias_info()) {
        source = static_cast<int>(i);
      }
    }
    return_of.push_back(source);
    matched += source >= 0 ? 1 : 0;
  }
  writes_only = !has_out && matched == return_of.size();
  structured = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
  dynamic = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  random = op.hasTag(at::Tag::nondeterministic_seeded);
  foreach_lists = startsWith(name, "aten::_foreach_") || startsWith(name, "aten::_fused_adam") ||
                  startsWith(name, "aten::_fused_sgd") ||
                  startsWith(name, "aten::_fused_adagrad") ||
                  startsWith(name, "aten::_amp_foreach_");
  reads_precisions = !foreach_lists && !op.hasTag(at::Tag::pointwise);
  asks_kernel = name == "aten::_fused_sdp_choice";
  number_decides_shape = startsWith(name, "aten::arange") || startsWith(name, "aten::range") ||
                         startsWith(name, "aten::linspace") || startsWith(name, "aten::logspace");
  takes_host_index = startsWith(name, "aten::index") || startsWith(name, "aten::_index_put") ||
                     startsWith(name, "aten::_unsafe_index");
}

}  // namespace shoal::client
