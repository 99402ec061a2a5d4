#include "client/call/shape_rules.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <unordered_map>

namespace shoal::client {

OutputMeta contiguousMeta(at::IntArrayRef sizes, c10::ScalarType dtype) {
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

OutputMeta packedMeta(at::IntArrayRef sizes, c10::ScalarType dtype, at::MemoryFormat format) {
  OutputMeta meta = contiguousMeta(sizes, dtype);
  if (format == at::MemoryFormat::ChannelsLast && sizes.size() == 4) {
    meta.strides = c10::get_channels_last_strides_2d(sizes);
  }
  if (format == at::MemoryFormat::ChannelsLast3d && sizes.size() == 5) {
    meta.strides = c10::get_channels_last_strides_3d(sizes);
  }
  return meta;
}

bool isDefinedTensor(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined();
}

namespace {

using Arguments = RuleArguments;
using Outputs = std::vector<OutputMeta>;

constexpr auto contiguous = contiguousMeta;

c10::ScalarType dtypeOr(const c10::IValue& value, c10::ScalarType otherwise) {
  return value.isNone() ? otherwise : static_cast<c10::ScalarType>(value.toInt());
}

c10::ScalarType defaultDtype() {
  return c10::get_default_dtype_as_scalartype();
}

bool stridedOnly(const c10::IValue& layout) {
  return layout.isNone() || static_cast<c10::Layout>(layout.toInt()) == c10::kStrided;
}

// A new tensor of the same sizes that lies as `self` does, but packed.
bool like(const at::Tensor& self, Outputs& out) {
  out.push_back(contiguous(self.sizes(), self.scalar_type()));
  if (self.is_non_overlapping_and_dense()) {
    out.back().strides.assign(self.strides().begin(), self.strides().end());
  } else {
    const auto strides = at::infer_dense_strides(self.sizes(), self.strides());
    out.back().strides.assign(strides.begin(), strides.end());
  }
  return true;
}

// relu(self), abs(self)
bool sameType(Arguments a, Outputs& out) {
  const at::Tensor& self = a[0].toTensor();
  const auto dtype = self.scalar_type();
  return dtype != at::kBool && !c10::isComplexType(dtype) && like(self, out);
}

// mul.Scalar(self, other) and its kin: a number changes no dtype of its own kind or above
bool withNumber(Arguments a, Outputs& out) {
  const at::Tensor& self = a[0].toTensor();
  const bool whole = c10::isIntegralType(self.scalar_type(), /*includeBool=*/false);
  const bool fits = (whole && a[1].isInt()) ||
                    (c10::isFloatingType(self.scalar_type()) && (a[1].isInt() || a[1].isDouble()));
  return fits && like(self, out);
}

// div.Scalar(self, other)
bool dividedByNumber(Arguments a, Outputs& out) {
  return c10::isFloatingType(a[0].toTensor().scalar_type()) && withNumber(a, out);
}

// native_dropout_backward(grad_output, mask, scale)
bool dropoutBackward(Arguments a, Outputs& out) {
  const at::Tensor& grad = a[0].toTensor();
  const at::Tensor& mask = a[1].toTensor();
  if (grad.sizes() != mask.sizes() || grad.strides() != mask.strides()) return false;
  return c10::isFloatingType(grad.scalar_type()) && like(grad, out);
}

// where.self(condition, self, other)
bool where(Arguments a, Outputs& out) {
  const at::Tensor& condition = a[0].toTensor();
  const at::Tensor& self = a[1].toTensor();
  const at::Tensor& other = a[2].toTensor();
  if (condition.scalar_type() != at::kBool || self.scalar_type() != other.scalar_type()) {
    return false;
  }
  for (const auto* part : {&condition, &self, &other}) {
    if (!part->is_contiguous()) return false;
  }
  const auto sizes = at::infer_size(at::infer_size(condition.sizes(), self.sizes()), other.sizes());
  out.push_back(contiguous(sizes, self.scalar_type()));
  return true;
}

// stack(tensors, dim)
bool stack(Arguments a, Outputs& out) {
  const auto tensors = a[0].toTensorVector();
  if (tensors.empty()) return false;
  const at::Tensor& first = tensors[0];
  int64_t dim = a[1].toInt();
  if (dim < 0) dim += first.dim() + 1;
  if (dim < 0 || dim > first.dim()) return false;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.sizes() != first.sizes() || tensor.scalar_type() != first.scalar_type() ||
        !tensor.is_contiguous()) {
      return false;
    }
  }
  auto sizes = first.sizes().vec();
  sizes.insert(sizes.begin() + dim, static_cast<int64_t>(tensors.size()));
  out.push_back(contiguous(sizes, first.scalar_type()));
  return true;
}

// slice_backward, select_backward (grad_output, input_sizes, …)
bool ofInputSizes(Arguments a, Outputs& out) {
  out.push_back(contiguous(a[1].toIntVector(), a[0].toTensor().scalar_type()));
  return true;
}

// constant_pad_nd(self, pad, value) that only adds: the last dimension's pair comes first
bool constantPad(Arguments a, Outputs& out) {
  const at::Tensor& self = a[0].toTensor();
  const auto pad = a[1].toIntVector();
  const size_t pairs = pad.size() / 2;
  if (pad.size() % 2 != 0 || pairs > static_cast<size_t>(self.dim()) || !self.is_contiguous() ||
      std::any_of(pad.begin(), pad.end(), [](int64_t n) { return n < 0; })) {
    return false;
  }
  auto sizes = self.sizes().vec();
  for (size_t i = 0; i < pairs; ++i) sizes[sizes.size() - 1 - i] += pad[2 * i] + pad[2 * i + 1];
  out.push_back(contiguous(sizes, self.scalar_type()));
  return true;
}

// pixel_shuffle(self, upscale_factor)
bool pixelShuffle(Arguments a, Outputs& out) {
  const at::Tensor& self = a[0].toTensor();
  const int64_t factor = a[1].toInt();
  if (self.dim() < 3 || factor < 1 || factor > 1 << 15 || self.size(-3) % (factor * factor) != 0 ||
      !self.is_contiguous()) {
    return false;
  }
  auto sizes = self.sizes().vec();
  sizes[sizes.size() - 3] /= factor * factor;
  sizes[sizes.size() - 2] *= factor;
  sizes[sizes.size() - 1] *= factor;
  out.push_back(contiguous(sizes, self.scalar_type()));
  return true;
}

// pixel_unshuffle(self, downscale_factor)
bool pixelUnshuffle(Arguments a, Outputs& out) {
  const at::Tensor& self = a[0].toTensor();
  const int64_t factor = a[1].toInt();
  if (self.dim() < 3 || factor < 1 || factor > 1 << 15 || self.size(-2) % factor != 0 ||
      self.size(-1) % factor != 0 || !self.is_contiguous()) {
    return false;
  }
  auto sizes = self.sizes().vec();
  sizes[sizes.size() - 3] *= factor * factor;
  sizes[sizes.size() - 2] /= factor;
  sizes[sizes.size() - 1] /= factor;
  out.push_back(contiguous(sizes, self.scalar_type()));
  return true;
}

// _safe_softmax(self, dim, dtype)
bool safeSoftmax(Arguments a, Outputs& out) {
  const at::Tensor& self = a[0].toTensor();
  if (!self.is_contiguous() || !c10::isFloatingType(self.scalar_type()) ||
      dtypeOr(a[2], self.scalar_type()) != self.scalar_type()) {
    return false;
  }
  out.push_back(contiguous(self.sizes(), self.scalar_type()));
  return true;
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

// clone(self, *, memory_format)
bool clone(Arguments a, Outputs& out) {
  const at::Tensor& self = a[0].toTensor();
  const auto format =
      a[1].isNone() ? at::MemoryFormat::Preserve : static_cast<at::MemoryFormat>(a[1].toInt());
  if (format == at::MemoryFormat::Preserve) return like(self, out);
  if (format == at::MemoryFormat::ChannelsLast && self.dim() != 4) return false;
  if (format == at::MemoryFormat::ChannelsLast3d && self.dim() != 5) return false;
  out.push_back(packedMeta(self.sizes(), self.scalar_type(), format));
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

const std::unordered_map<std::string, ShapeRule>& rules() {
  static const std::unordered_map<std::string, ShapeRule> table = {
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
      {"aten::index_select", indexSelect},
      {"aten::native_dropout", dropout},
      {"aten::logical_not", logicalNot},
      {"aten::masked_fill.Scalar", maskedFill},
      {"aten::masked_fill.Tensor", maskedFill},
      {"aten::sum", sumAll},
      {"aten::max", extremeOfAll},
      {"aten::min", extremeOfAll},
      {"aten::relu", sameType},
      {"aten::abs", sameType},
      {"aten::add.Scalar", withNumber},
      {"aten::sub.Scalar", withNumber},
      {"aten::mul.Scalar", withNumber},
      {"aten::div.Scalar", dividedByNumber},
      {"aten::native_dropout_backward", dropoutBackward},
      {"aten::where.self", where},
      {"aten::stack", stack},
      {"aten::slice_backward", ofInputSizes},
      {"aten::select_backward", ofInputSizes},
      {"aten::constant_pad_nd", constantPad},
      {"aten::_safe_softmax", safeSoftmax},
      {"aten::pixel_shuffle", pixelShuffle},
      {"aten::pixel_unshuffle", pixelUnshuffle},
  };
  return table;
}

}  // namespace

bool applyShapeRule(const std::string& name, RuleArguments arguments,
                    std::vector<OutputMeta>& outputs) {
  const auto found = rules().find(name);
  const ShapeRule rule = found != rules().end() ? found->second : layerRule(name);
  return rule != nullptr && rule(arguments, outputs);
}

}  // namespace shoal::client
