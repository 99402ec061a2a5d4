// Shape rules of layers and their backward passes.
#include <ATen/core/Tensor.h>

#include <unordered_map>

#include "client/call/shape_rules.h"

namespace shoal::client {
namespace {

using Arguments = RuleArguments;
using Outputs = std::vector<OutputMeta>;

OutputMeta undefined() {
  OutputMeta meta;
  meta.kind = wire::OutputKind::kUndefined;
  return meta;
}

// A packed tensor, in the order that torch takes it for.
bool isPacked(const at::Tensor& tensor) {
  return tensor.is_contiguous(tensor.suggest_memory_format()) && tensor.numel() > 0;
}

bool isPackedFloat(const c10::IValue& value) {
  return isDefinedTensor(value) && value.toTensor().scalar_type() == at::kFloat &&
         isPacked(value.toTensor());
}

bool isPlainFloat(const c10::IValue& value) {
  return isPackedFloat(value) && value.toTensor().is_contiguous() &&
         value.toTensor().suggest_memory_format() == at::MemoryFormat::Contiguous;
}

bool isPlainFloatOrNone(const c10::IValue& value) {
  return !isDefinedTensor(value) || isPlainFloat(value);
}

OutputMeta like(const at::Tensor& tensor) {
  return packedMeta(tensor.sizes(), tensor.scalar_type(), tensor.suggest_memory_format());
}

// --- convolution

// A number for each spatial dimension, or one for all.
int64_t along(const c10::IValue& numbers, size_t dim) {
  const auto list = numbers.toIntVector();
  return list.size() == 1 ? list[0] : list.at(dim);
}

bool fitsSpatially(const c10::IValue& numbers, size_t spatial) {
  const size_t given = numbers.toIntVector().size();
  return given == 1 || given == spatial;
}

// Channels come last if they do so in the input or in the weight.
at::MemoryFormat formatOfBoth(const at::Tensor& input, const at::Tensor& weight) {
  const auto format = input.suggest_memory_format();
  return format == at::MemoryFormat::Contiguous ? weight.suggest_memory_format() : format;
}

// convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
bool convolution(Arguments a, Outputs& out) {
  if (!isPackedFloat(a[0]) || !isPackedFloat(a[1]) || !isPlainFloatOrNone(a[2])) return false;
  const at::Tensor& input = a[0].toTensor();
  const at::Tensor& weight = a[1].toTensor();
  const bool transposed = a[6].toBool();
  const int64_t groups = a[8].toInt();
  if (input.dim() < 3 || input.dim() != weight.dim() || groups < 1) return false;
  const size_t spatial = static_cast<size_t>(input.dim()) - 2;
  for (const size_t list : {3, 4, 5, 7}) {
    if (!fitsSpatially(a[list], spatial)) return false;
  }
  const int64_t taken = transposed ? weight.size(0) : weight.size(1) * groups;
  const int64_t made = transposed ? weight.size(1) * groups : weight.size(0);
  if (input.size(1) != taken || weight.size(0) % groups != 0) return false;
  if (isDefinedTensor(a[2]) && (a[2].toTensor().dim() != 1 || a[2].toTensor().size(0) != made)) {
    return false;
  }
  std::vector<int64_t> sizes{input.size(0), made};
  for (size_t i = 0; i < spatial; ++i) {
    const auto dim = static_cast<int64_t>(i) + 2;
    const int64_t stride = along(a[3], i), padding = along(a[4], i), dilation = along(a[5], i);
    if (stride < 1 || padding < 0 || dilation < 1) return false;
    const int64_t reach = dilation * (weight.size(dim) - 1);
    const int64_t room = input.size(dim) + 2 * padding - reach - 1;
    if (!transposed && room < 0) return false;
    sizes.push_back(transposed
                        ? (input.size(dim) - 1) * stride - 2 * padding + reach + along(a[7], i) + 1
                        : room / stride + 1);
    if (sizes.back() < 1) return false;
  }
  out.push_back(packedMeta(sizes, input.scalar_type(), formatOfBoth(input, weight)));
  return true;
}

// convolution_backward(grad_output, input, weight, bias_sizes, stride, padding, dilation,
// transposed, output_padding, groups, output_mask)
bool convolutionBackward(Arguments a, Outputs& out) {
  const at::Tensor& grad = a[0].toTensor();
  if (grad.scalar_type() != at::kFloat || !isPackedFloat(a[1]) || !isPackedFloat(a[2]))
    return false;
  const auto format = formatOfBoth(a[1].toTensor(), a[2].toTensor());
  const auto wanted = a[10].toBoolList();
  for (const size_t i : {1, 2}) {
    const auto sizes = a[i].toTensor().sizes();
    out.push_back(wanted[i - 1] ? packedMeta(sizes, at::kFloat, format) : undefined());
  }
  out.push_back(wanted[2] ? contiguousMeta({grad.size(1)}, grad.scalar_type()) : undefined());
  return true;
}

// --- normalisation

// native_layer_norm(input, normalized_shape, weight, bias, eps) -> (out, mean, rstd)
bool layerNorm(Arguments a, Outputs& out) {
  const at::Tensor& input = a[0].toTensor();
  const auto normalized = a[1].toIntVector();
  const auto dims = static_cast<size_t>(input.dim());
  if (normalized.size() > dims || input.scalar_type() != at::kFloat || !input.is_contiguous()) {
    return false;
  }
  if (isDefinedTensor(a[2]) && a[2].toTensor().scalar_type() != at::kFloat) return false;
  auto stat = input.sizes().vec();
  for (size_t i = dims - normalized.size(); i < dims; ++i) {
    if (input.sizes()[i] != normalized[i - (dims - normalized.size())]) return false;
    stat[i] = 1;
  }
  out.push_back(contiguousMeta(input.sizes(), input.scalar_type()));
  out.push_back(contiguousMeta(stat, input.scalar_type()));
  out.push_back(contiguousMeta(stat, input.scalar_type()));
  return true;
}

// native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias,
// output_mask)
bool layerNormBackward(Arguments a, Outputs& out) {
  if (!isPlainFloat(a[1]) || !isPlainFloatOrNone(a[5]) || !isPlainFloatOrNone(a[6])) return false;
  const auto wanted = a[7].toBoolList();
  const size_t from[] = {1, 5, 6};
  for (size_t i = 0; i < 3; ++i) {
    if (wanted[i] && !isDefinedTensor(a[from[i]])) return false;
    out.push_back(wanted[i] ? like(a[from[i]].toTensor()) : undefined());
  }
  return true;
}

// native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps) ->
// (out, save_mean, save_invstd), in training
bool batchNorm(Arguments a, Outputs& out) {
  if (!isPackedFloat(a[0]) || !a[5].toBool()) return false;
  for (const size_t i : {1, 2, 3, 4}) {
    if (!isPlainFloatOrNone(a[i])) return false;
  }
  const at::Tensor& input = a[0].toTensor();
  if (input.dim() < 2) return false;
  out.push_back(like(input));
  out.push_back(contiguousMeta({input.size(1)}, input.scalar_type()));
  out.push_back(out.back());
  return true;
}

// native_batch_norm_backward(grad_out, input, weight, running_mean, running_var, save_mean,
// save_invstd, train, eps, output_mask)
bool batchNormBackward(Arguments a, Outputs& out) {
  if (!isPackedFloat(a[0]) || !isPackedFloat(a[1]) || !isPlainFloatOrNone(a[2])) return false;
  const at::Tensor& input = a[1].toTensor();
  const auto wanted = a[9].toBoolList();
  out.push_back(wanted[0] ? like(input) : undefined());
  for (const size_t i : {1, 2}) {
    out.push_back(wanted[i] ? contiguousMeta({input.size(1)}, input.scalar_type()) : undefined());
  }
  return true;
}

// native_group_norm(input, weight, bias, N, C, HxW, group, eps) -> (out, mean, rstd)
bool groupNorm(Arguments a, Outputs& out) {
  if (!isPlainFloat(a[0]) || !isPlainFloatOrNone(a[1]) || !isPlainFloatOrNone(a[2])) return false;
  const int64_t groups = a[6].toInt();
  if (groups < 1 || a[4].toInt() % groups != 0) return false;
  out.push_back(like(a[0].toTensor()));
  out.push_back(contiguousMeta({a[3].toInt(), groups}, at::kFloat));
  out.push_back(out.back());
  return true;
}

// native_group_norm_backward(grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask)
bool groupNormBackward(Arguments a, Outputs& out) {
  if (!isPlainFloat(a[0]) || !isPlainFloat(a[1]) || !isPlainFloatOrNone(a[4])) return false;
  const auto wanted = a[9].toBoolList();
  out.push_back(wanted[0] ? like(a[1].toTensor()) : undefined());
  for (const size_t i : {1, 2}) {
    out.push_back(wanted[i] ? contiguousMeta({a[6].toInt()}, at::kFloat) : undefined());
  }
  return true;
}

// --- pooling

// _adaptive_avg_pool2d(self, output_size)
bool adaptivePool(Arguments a, Outputs& out) {
  const auto sizes = a[1].toIntVector();
  if (!isPlainFloat(a[0]) || sizes.size() != 2 || a[0].toTensor().dim() != 4) return false;
  const at::Tensor& self = a[0].toTensor();
  if (sizes[0] < 1 || sizes[1] < 1) return false;
  out.push_back(contiguousMeta({self.size(0), self.size(1), sizes[0], sizes[1]}, at::kFloat));
  return true;
}

// _adaptive_avg_pool2d_backward(grad_output, self)
bool adaptivePoolBackward(Arguments a, Outputs& out) {
  if (!isPlainFloat(a[0]) || !isPlainFloat(a[1])) return false;
  out.push_back(like(a[1].toTensor()));
  return true;
}

// --- attention

// A tensor [batch, heads, length, width] that lies as [batch, length, heads, width].
OutputMeta headsInside(const at::Tensor& tensor, int64_t width) {
  const int64_t heads = tensor.size(1), length = tensor.size(2);
  auto meta = contiguousMeta({tensor.size(0), heads, length, width}, tensor.scalar_type());
  meta.strides = {length * heads * width, width, heads * width, 1};
  return meta;
}

// _scaled_dot_product_flash_attention_for_cpu(query, key, value, …) -> (output, logsumexp): both
// are made with heads and positions exchanged
bool flashAttention(Arguments a, Outputs& out) {
  const at::Tensor& query = a[0].toTensor();
  const at::Tensor& value = a[2].toTensor();
  if (query.dim() != 4 || value.dim() != 4 || query.size(3) != value.size(3)) return false;
  const int64_t batch = query.size(0), heads = query.size(1), length = query.size(2);
  out.push_back(headsInside(query, query.size(3)));
  const auto accumulated = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  out.push_back(contiguousMeta({batch, heads, length}, accumulated));
  out.back().strides = {length * heads, 1, heads};
  return query.numel() > 0;
}

// _scaled_dot_product_flash_attention_for_cpu_backward(grad_out, query, key, value, …): gradients
// of the three
bool flashAttentionBackward(Arguments a, Outputs& out) {
  for (const size_t i : {1, 2, 3}) {
    const at::Tensor& tensor = a[i].toTensor();
    if (tensor.dim() != 4 || tensor.numel() == 0) return false;
    out.push_back(headsInside(tensor, tensor.size(3)));
  }
  return true;
}

}  // namespace

ShapeRule layerRule(const std::string& name) {
  static const std::unordered_map<std::string, ShapeRule> table = {
      {"aten::convolution", convolution},
      {"aten::convolution_backward", convolutionBackward},
      {"aten::native_layer_norm", layerNorm},
      {"aten::native_layer_norm_backward", layerNormBackward},
      {"aten::native_batch_norm", batchNorm},
      {"aten::native_batch_norm_backward", batchNormBackward},
      {"aten::native_group_norm", groupNorm},
      {"aten::native_group_norm_backward", groupNormBackward},
      {"aten::_adaptive_avg_pool2d", adaptivePool},
      {"aten::_adaptive_avg_pool2d_backward", adaptivePoolBackward},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", flashAttention},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", flashAttentionBackward},
  };
  const auto found = table.find(name);
  return found != table.end() ? found->second : nullptr;
}

}  // namespace shoal::client
