#include "client/shape_rules.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DefaultDtype.h>

#include <unordered_map>

namespace shoal::client {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using Outputs = std::vector<OutputMeta>;
using Rule = bool (*)(Arguments, Outputs&);

OutputMeta contiguous(at::IntArrayRef sizes, c10::ScalarType dtype) {
  OutputMeta meta;
  meta.dtype = dtype;
  meta.sizes.assign(sizes.begin(), sizes.end());
  meta.strides.resize(sizes.size());
  int64_t stride = 1;
  int64_t elements = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    meta.strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
    elements *= sizes[i];
  }
  meta.bytes = static_cast<uint64_t>(elements) * c10::elementSize(dtype);
  return meta;
}

bool isTensor(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined();
}

c10::ScalarType dtypeOr(const c10::IValue& value, c10::ScalarType otherwise) {
  return value.isNone() ? otherwise : static_cast<c10::ScalarType>(value.toInt());
}

c10::ScalarType defaultDtype() {
  return c10::get_default_dtype_as_scalartype();
}

bool stridedOnly(const c10::IValue& layout) {
  return layout.isNone() || static_cast<c10::Layout>(layout.toInt()) == c10::kStrided;
}

// zeros, ones, rand, randn (size, *, dtype, layout, device, pin_memory)
bool sizedFactory(Arguments a, Outputs& out) {
  if (!stridedOnly(a[2])) return false;
  out.push_back(contiguous(a[0].toIntVector(), dtypeOr(a[1], defaultDtype())));
  return true;
}

// full(size, fill_value, *, dtype, …)
bool full(Arguments a, Outputs& out) {
  if (a[2].isNone() || !stridedOnly(a[3])) return false;
  out.push_back(contiguous(a[0].toIntVector(), dtypeOr(a[2], defaultDtype())));
  return true;
}

// arange(start, end, step, *, dtype, …) of whole numbers
bool arange(Arguments a, Outputs& out) {
  if (!a[0].isInt() || !a[1].isInt() || !a[2].isInt() || !stridedOnly(a[4])) return false;
  const int64_t start = a[0].toInt(), end = a[1].toInt(), step = a[2].toInt();
  if (step == 0 || (step > 0) != (end >= start)) return false;  // torch says what is wrong
  const int64_t count = (end - start + step - (step > 0 ? 1 : -1)) / step;
  out.push_back(contiguous({count}, dtypeOr(a[3], at::kLong)));
  return true;
}

bool arangeFromStart(Arguments a, Outputs& out) {  // (start, end, *, dtype, …)
  return arange({a[0], a[1], c10::IValue(1), a[2], a[3]}, out);
}

bool arangeToEnd(Arguments a, Outputs& out) {  // (end, *, dtype, …)
  return arange({c10::IValue(0), a[0], c10::IValue(1), a[1], a[2]}, out);
}

// embedding(weight, indices, …)
bool embedding(Arguments a, Outputs& out) {
  const at::Tensor& weight = a[0].toTensor();
  if (weight.dim() != 2) return false;
  auto sizes = a[1].toTensor().sizes().vec();
  sizes.push_back(weight.size(1));
  out.push_back(contiguous(sizes, weight.scalar_type()));
  return true;
}

// embedding_dense_backward(grad, indices, num_weights, …)
bool embeddingBackward(Arguments a, Outputs& out) {
  const at::Tensor& grad = a[0].toTensor();
  if (grad.dim() == 0) return false;
  out.push_back(contiguous({a[2].toInt(), grad.size(-1)}, grad.scalar_type()));
  return true;
}

// clone(self, *, memory_format): only where the layout needs no thought
bool clone(Arguments a, Outputs& out) {
  const at::Tensor& self = a[0].toTensor();
  const bool plain =
      a[1].isNone() || a[1].toInt() == static_cast<int64_t>(at::MemoryFormat::Preserve);
  const bool packed = !plain && a[1].toInt() == static_cast<int64_t>(at::MemoryFormat::Contiguous);
  if (packed || (plain && self.is_contiguous())) {
    out.push_back(contiguous(self.sizes(), self.scalar_type()));
    return true;
  }
  return false;
}

// native_layer_norm(input, normalized_shape, weight, bias, eps) -> (out, mean, rstd)
bool layerNorm(Arguments a, Outputs& out) {
  const at::Tensor& input = a[0].toTensor();
  const auto normalized = a[1].toIntVector();
  const auto dims = static_cast<size_t>(input.dim());
  if (normalized.size() > dims || input.scalar_type() != at::kFloat || !input.is_contiguous()) {
    return false;
  }
  if (isTensor(a[2]) && a[2].toTensor().scalar_type() != at::kFloat) return false;
  auto stat = input.sizes().vec();
  for (size_t i = dims - normalized.size(); i < dims; ++i) {
    if (input.sizes()[i] != normalized[i - (dims - normalized.size())]) return false;
    stat[i] = 1;
  }
  out.push_back(contiguous(input.sizes(), input.scalar_type()));
  out.push_back(contiguous(stat, input.scalar_type()));
  out.push_back(contiguous(stat, input.scalar_type()));
  return true;
}

// index_select(self, dim, index)
bool indexSelect(Arguments a, Outputs& out) {
  const at::Tensor& self = a[0].toTensor();
  const at::Tensor& index = a[2].toTensor();
  int64_t dim = a[1].toInt();
  if (dim < 0) dim += self.dim();
  if (index.dim() > 1 || dim < 0 || dim >= self.dim() || !self.is_contiguous()) return false;
  auto sizes = self.sizes().vec();
  sizes[static_cast<size_t>(dim)] = index.numel();
  out.push_back(contiguous(sizes, self.scalar_type()));
  return true;
}

// native_dropout(input, p, train) -> (output, mask)
bool dropout(Arguments a, Outputs& out) {
  const at::Tensor& input = a[0].toTensor();
  if (!input.is_contiguous()) return false;
  out.push_back(contiguous(input.sizes(), input.scalar_type()));
  out.push_back(contiguous(input.sizes(), at::kBool));
  return true;
}

// logical_not(self)
bool logicalNot(Arguments a, Outputs& out) {
  const at::Tensor& self = a[0].toTensor();
  if (!self.is_contiguous()) return false;
  out.push_back(contiguous(self.sizes(), at::kBool));
  return true;
}

// masked_fill(self, mask, value), where the mask does not widen the result
bool maskedFill(Arguments a, Outputs& out) {
  const at::Tensor& self = a[0].toTensor();
  const at::Tensor& mask = a[1].toTensor();
  if (!self.is_contiguous() || mask.dim() > self.dim()) return false;
  for (int64_t i = 1; i <= mask.dim(); ++i) {
    if (mask.size(-i) != 1 && mask.size(-i) != self.size(-i)) return false;
  }
  out.push_back(contiguous(self.sizes(), self.scalar_type()));
  return true;
}

// sum(self, *, dtype) over everything
bool sumAll(Arguments a, Outputs& out) {
  const auto own = a[0].toTensor().scalar_type();
  out.push_back(contiguous({}, dtypeOr(a[1], c10::isIntegralType(own, true) ? at::kLong : own)));
  return true;
}

// max(self), min(self) over everything
bool extremeOfAll(Arguments a, Outputs& out) {
  out.push_back(contiguous({}, a[0].toTensor().scalar_type()));
  return true;
}

// _scaled_dot_product_flash_attention_for_cpu(query, key, value, …) -> (output, logsumexp): both
// are made with heads and positions exchanged
bool flashAttention(Arguments a, Outputs& out) {
  const at::Tensor& query = a[0].toTensor();
  const at::Tensor& value = a[2].toTensor();
  if (query.dim() != 4 || value.dim() != 4 || query.size(3) != value.size(3)) return false;
  const int64_t batch = query.size(0), heads = query.size(1), length = query.size(2);
  const int64_t width = query.size(3);
  out.push_back(contiguous({batch, heads, length, width}, query.scalar_type()));
  out.back().strides = {length * heads * width, width, heads * width, 1};
  const auto accumulated = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  out.push_back(contiguous({batch, heads, length}, accumulated));
  out.back().strides = {length * heads, 1, heads};
  return query.numel() > 0;
}

const std::unordered_map<std::string, Rule>& rules() {
  static const std::unordered_map<std::string, Rule> table = {
      {"aten::zeros", sizedFactory},
      {"aten::ones", sizedFactory},
      {"aten::rand", sizedFactory},
      {"aten::randn", sizedFactory},
      {"aten::full", full},
      {"aten::arange", arangeToEnd},
      {"aten::arange.start", arangeFromStart},
      {"aten::arange.start_step", arange},
      {"aten::embedding", embedding},
      {"aten::embedding_dense_backward", embeddingBackward},
      {"aten::clone", clone},
      {"aten::native_layer_norm", layerNorm},
      {"aten::index_select", indexSelect},
      {"aten::native_dropout", dropout},
      {"aten::logical_not", logicalNot},
      {"aten::masked_fill.Scalar", maskedFill},
      {"aten::masked_fill.Tensor", maskedFill},
      {"aten::sum", sumAll},
      {"aten::max", extremeOfAll},
      {"aten::min", extremeOfAll},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", flashAttention},
  };
  return table;
}

}  // namespace

bool applyShapeRule(const std::string& name, Arguments arguments, Outputs& outputs) {
  const auto found = rules().find(name);
  return found != rules().end() && found->second(arguments, outputs);
}

}  // namespace shoal::client
