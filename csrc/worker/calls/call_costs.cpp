#include "worker/calls/call_costs.h"

#include <algorithm>
#include <string_view>

namespace shoal::worker {
namespace {

// A client chooses the sizes, and their products may overflow 64 bits.
uint64_t clamped(double value) {
  constexpr double kMost = 4e18;
  return static_cast<uint64_t>(std::clamp(value, 0.0, kMost));
}

double numel(const Shape& shape) {
  double count = 1;
  for (const int64_t size : shape.sizes) count *= static_cast<double>(size);
  return count;
}

double size(const Shape& shape, size_t back) {
  return back < shape.sizes.size() ? static_cast<double>(shape.sizes[shape.sizes.size() - 1 - back])
                                   : 1.0;
}

const Shape* tensor(const PreparedCall& call, size_t index) {
  if (index >= call.arguments.size() || call.arguments[index].tag != wire::Tag::kTensor) {
    return nullptr;
  }
  return &call.arguments[index].shape;
}

// Of [..., n, k] times [..., k, m]: 2 n k m for each matrix of the batch.
double product(const PreparedCall& call, size_t left, size_t right) {
  const Shape* a = tensor(call, left);
  const Shape* b = tensor(call, right);
  if (a == nullptr || b == nullptr) return 0;
  return 2 * numel(*a) * (b->sizes.size() > 1 ? size(*b, 0) : 1);
}

double linear(const PreparedCall& call) {
  const Shape* input = tensor(call, 0);
  const Shape* weight = tensor(call, 1);
  if (input == nullptr || weight == nullptr) return 0;
  return 2 * numel(*input) * size(*weight, 1);
}

bool flag(const PreparedCall& call, size_t index) {
  return index < call.arguments.size() && call.arguments[index].constant.isBool() &&
         call.arguments[index].constant.toBool();
}

// Each item of the output takes a row of the weight; a transposed convolution swaps the two.
double convolution(const Shape* input, const Shape* weight, const Shape* output, bool transposed) {
  const Shape* items = transposed ? input : output;
  if (items == nullptr || weight == nullptr || weight->sizes.empty()) return 0;
  return 2 * numel(*items) * numel(*weight) / std::max(1.0, static_cast<double>(weight->sizes[0]));
}

double convolutionBackward(const PreparedCall& call) {
  const double once = convolution(tensor(call, 1), tensor(call, 2), tensor(call, 0), flag(call, 7));
  double products = 0;  // the gradients of input and weight take one each
  if (call.arguments.size() > 10 && call.arguments[10].constant.isBoolList()) {
    const auto mask = call.arguments[10].constant.toBoolList();
    for (size_t i = 0; i < mask.size() && i < 2; ++i) products += mask.get(i) ? 1 : 0;
  }
  return products * once;
}

double attention(const PreparedCall& call, bool backward) {
  const size_t first = backward ? 1 : 0;
  const Shape* query = tensor(call, first);
  const Shape* key = tensor(call, first + 1);
  const Shape* value = tensor(call, first + 2);
  if (query == nullptr || key == nullptr || value == nullptr) return 0;
  // [batch, heads, queries, size]: queries × keys, twice; backward it takes five such products.
  const double pairs = numel(*query) / std::max(1.0, size(*query, 0)) * size(*key, 1);
  const double once = 2 * pairs * size(*query, 0), other = 2 * pairs * size(*value, 0);
  return backward ? 3 * once + 2 * other : once + other;
}

const Shape* firstOutput(const PreparedCall& call) {
  for (const Output& output : call.outputs) {
    if (output.kind == wire::OutputKind::kFresh) return &output.shape;
  }
  return nullptr;
}

double flops(const PreparedCall& call) {
  std::string_view name = call.name;
  name = name.substr(0, name.find('.'));
  if (name == "aten::mm" || name == "aten::bmm" || name == "aten::mv" || name == "aten::dot" ||
      name == "aten::_int_mm") {
    return product(call, 0, 1);
  }
  if (name == "aten::addmm" || name == "aten::addmm_" || name == "aten::baddbmm" ||
      name == "aten::baddbmm_" || name == "aten::addmv" || name == "aten::_addmm_activation") {
    return product(call, 1, 2);
  }
  if (name == "aten::linear") return linear(call);
  if (name == "aten::convolution" || name == "aten::_convolution" ||
      name == "aten::convolution_overrideable") {
    return convolution(tensor(call, 0), tensor(call, 1), firstOutput(call), flag(call, 6));
  }
  if (name == "aten::convolution_backward" || name == "aten::convolution_backward_overrideable") {
    return convolutionBackward(call);
  }
  if (name.starts_with("aten::_scaled_dot_product_")) {
    return attention(call, name.find("_backward") != std::string_view::npos);
  }
  return 0;
}

struct Sum {
  double bytes = 0;
  c10::ScalarType dtype = c10::ScalarType::Undefined;

  void add(const Argument& argument, bool written) {
    if (argument.tag == wire::Tag::kTensor) {
      bytes += static_cast<double>(argument.shape.span_bytes) * (written ? 2 : 1);
      if (dtype == c10::ScalarType::Undefined) dtype = argument.shape.dtype;
    }
    for (const Argument& item : argument.items) add(item, written);
  }
};

}  // namespace

CallCosts costsOf(const PreparedCall& call) {
  Sum sum;
  for (size_t i = 0; i < call.arguments.size(); ++i) sum.add(call.arguments[i], call.written[i]);
  for (const Output& output : call.outputs) {
    if (output.kind == wire::OutputKind::kFresh) {
      sum.bytes += static_cast<double>(output.shape.span_bytes);
      if (sum.dtype == c10::ScalarType::Undefined) sum.dtype = output.shape.dtype;
    }
  }
  return {clamped(flops(call)), clamped(sum.bytes), sum.dtype};
}

CallCosts backwardCosts(const CallCosts& forward) {
  // A product's backward pass has two products.
  return {clamped(2.0 * static_cast<double>(forward.flops)),
          clamped(2.0 * static_cast<double>(forward.bytes)), forward.dtype};
}

}  // namespace shoal::worker
