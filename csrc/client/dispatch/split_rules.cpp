#include "client/dispatch/split_rules.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <functional>
#include <unordered_map>
#include <unordered_set>

namespace shoal::client {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using Cuts = std::vector<Cut>;

bool holdsTensor(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined();
}

Cut cutWith(Arguments arguments, std::initializer_list<int64_t> dims, int64_t out_dim,
            std::vector<Join> joins = {}) {
  Cut cut{std::vector<int64_t>(arguments.size(), -1), out_dim, std::move(joins)};
  std::copy(dims.begin(), dims.end(), cut.dims.begin());
  return cut;
}

// Which argument has this name; -1 if none.
int argumentNamed(const OperatorInfo& info, const char* name) {
  const auto& arguments = info.op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == name) return static_cast<int>(i);
  }
  return -1;
}

std::string baseName(const OperatorInfo& info) {
  return info.op.operator_name().name.substr(6);  // after "aten::"
}

// --- every element by itself

// Beside those that torch tags: these do to each element the same, or draw a number for it.
bool isElementwise(const OperatorInfo& info) {
  static const std::unordered_set<std::string> names = {
      "zero_",          "fill_",
      "copy_",          "clone",
      "uniform_",       "normal_",
      "random_",        "cauchy_",
      "log_normal_",    "geometric_",
      "exponential_",   "bernoulli_",
      "native_dropout", "native_dropout_backward"};
  return info.op.hasTag(at::Tag::pointwise) || names.count(baseName(info)) > 0;
}

Cuts elementwise(Arguments arguments) {
  std::vector<int64_t> shape;
  for (const auto& argument : arguments) {
    if (!holdsTensor(argument)) continue;
    const auto sizes = argument.toTensor().sizes();
    if (sizes.size() > shape.size()) shape.insert(shape.begin(), sizes.size() - shape.size(), 1);
    const size_t shift = shape.size() - sizes.size();
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] != 1) shape[i + shift] = sizes[i];
    }
  }
  Cuts cuts;
  const auto rank = static_cast<int64_t>(shape.size());
  for (int64_t d = 0; d < rank; ++d) {
    if (shape[static_cast<size_t>(d)] < 2) continue;
    Cut cut = cutWith(arguments, {}, d);
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!holdsTensor(arguments[i])) continue;
      const at::Tensor& t = arguments[i].toTensor();
      const int64_t own = d - (rank - t.dim());
      if (own >= 0 && t.size(own) > 1) cut.dims[i] = own;
    }
    cuts.push_back(std::move(cut));
  }
  return cuts;
}

// --- along one dimension, and each row of the others by itself

Cuts besideDim(const OperatorInfo& info, Arguments arguments) {
  const int at = argumentNamed(info, "dim");
  if (at < 0 || !arguments[static_cast<size_t>(at)].isInt() || !holdsTensor(arguments[0]))
    return {};
  const at::Tensor& self = arguments[0].toTensor();
  const int64_t rank = self.dim();
  const int64_t dim =
      (arguments[static_cast<size_t>(at)].toInt() + rank) % std::max<int64_t>(rank, 1);
  Cuts cuts;
  for (int64_t d = 0; d < rank; ++d) {
    if (d == dim) continue;
    Cut cut = cutWith(arguments, {}, d);
    bool equal = true;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!holdsTensor(arguments[i]) || arguments[i].toTensor().dim() != rank) continue;
      equal = equal && arguments[i].toTensor().size(d) == self.size(d);
      cut.dims[i] = d;
    }
    if (equal) cuts.push_back(std::move(cut));
  }
  return cuts;
}

// --- reductions

const std::unordered_map<std::string, std::optional<Join>>& reductions() {
  static const std::unordered_map<std::string, std::optional<Join>> known = {
      {"sum", Join::kSum},
      {"nansum", Join::kSum},
      {"count_nonzero", Join::kSum},
      {"amax", Join::kMax},
      {"amin", Join::kMin},
      {"prod", Join::kProd},
      {"all", Join::kAll},
      {"any", Join::kAny},
      {"linalg_vector_norm", Join::kNorm},
      {"mean", {}},
      {"var", {}},
      {"std", {}},
      {"var_mean", {}},
      {"argmax", {}},
      {"argmin", {}},
      {"logsumexp", {}},
      {"max", Join::kMax},
      {"min", Join::kMin}};
  return known;
}

std::vector<bool> reducedDims(const OperatorInfo& info, Arguments arguments, int64_t rank) {
  const int at = argumentNamed(info, "dim");
  std::vector<bool> reduced(static_cast<size_t>(rank), true);
  if (at < 0) return reduced;
  const c10::IValue& value = arguments[static_cast<size_t>(at)];
  std::vector<int64_t> dims;
  if (value.isInt()) dims = {value.toInt()};
  if (value.isIntList()) dims = value.toIntVector();
  if (dims.empty()) return reduced;
  reduced.assign(reduced.size(), false);
  for (const int64_t dim : dims) reduced[static_cast<size_t>((dim + rank) % rank)] = true;
  return reduced;
}

Cuts reduction(const OperatorInfo& info, Arguments arguments, std::optional<Join> join) {
  if (!holdsTensor(arguments[0]) || info.has_out) return {};
  const int64_t rank = arguments[0].toTensor().dim();
  const std::vector<bool> reduced = reducedDims(info, arguments, rank);
  const int keep = argumentNamed(info, "keepdim");
  const bool keepdim = keep >= 0 && arguments[static_cast<size_t>(keep)].toBool();
  const bool picks = info.return_of.size() > 1;  // max and min with a dimension tell which it was
  Cuts cuts;
  int64_t out = 0;
  for (int64_t d = 0; d < rank; ++d) {
    if (!reduced[static_cast<size_t>(d)]) {
      cuts.push_back(cutWith(arguments, {d}, keepdim ? d : out));
      ++out;
    } else if (join.has_value() && !picks) {
      cuts.push_back(cutWith(arguments, {d}, -1, {*join}));
    }
  }
  return cuts;
}

// --- products

Cuts mm(const OperatorInfo&, Arguments a) {
  return {cutWith(a, {0, -1}, 0), cutWith(a, {-1, 1}, 1), cutWith(a, {1, 0}, -1, {Join::kSum})};
}

Cuts addmm(const OperatorInfo&, Arguments a) {
  const at::Tensor& self = a[0].toTensor();
  const auto own = [&self](int64_t out_dim) -> int64_t {
    const int64_t dim = out_dim - (2 - self.dim());
    return dim >= 0 && self.size(dim) > 1 ? dim : -1;
  };
  return {cutWith(a, {own(0), 0, -1}, 0), cutWith(a, {own(1), -1, 1}, 1)};
}

Cuts bmm(const OperatorInfo&, Arguments a) {
  return {cutWith(a, {0, 0}, 0), cutWith(a, {1, -1}, 1), cutWith(a, {-1, 2}, 2),
          cutWith(a, {2, 1}, -1, {Join::kSum})};
}

Cuts baddbmm(const OperatorInfo&, Arguments a) {
  if (a[0].toTensor().sizes().size() != 3) return {};
  return {cutWith(a, {0, 0, 0}, 0), cutWith(a, {1, 1, -1}, 1), cutWith(a, {2, -1, 2}, 2)};
}

Cuts mv(const OperatorInfo&, Arguments a) {
  return {cutWith(a, {0, -1}, 0), cutWith(a, {1, 0}, -1, {Join::kSum})};
}

Cuts dot(const OperatorInfo&, Arguments a) {
  return {cutWith(a, {0, 0}, -1, {Join::kSum})};
}

// --- layers

Cuts convolution(const OperatorInfo&, Arguments a) {
  return {cutWith(a, {0}, 0)};
}

Cuts convolutionBackward(const OperatorInfo&, Arguments a) {
  return {cutWith(a, {0, 0}, 0, {Join::kCat, Join::kSum, Join::kSum})};
}

Cuts layerNorm(const OperatorInfo&, Arguments a) {
  Cuts cuts;
  const auto rows = a[0].toTensor().dim() - static_cast<int64_t>(a[1].toIntVector().size());
  for (int64_t d = 0; d < rows; ++d) cuts.push_back(cutWith(a, {d}, d));
  return cuts;
}

Cuts layerNormBackward(const OperatorInfo&, Arguments a) {
  Cuts cuts;
  const auto rows = a[0].toTensor().dim() - static_cast<int64_t>(a[2].toIntVector().size());
  for (int64_t d = 0; d < rows; ++d) {
    cuts.push_back(cutWith(a, {d, d, -1, d, d}, d, {Join::kCat, Join::kSum, Join::kSum}));
  }
  return cuts;
}

Cuts embedding(const OperatorInfo&, Arguments a) {
  if (a[1].toTensor().dim() == 0) return {};
  return {cutWith(a, {-1, 0}, 0)};
}

// `x[:, i]`: the first dimension is left alone.
Cuts index(const OperatorInfo&, Arguments a) {
  const auto list = a[1].toListRef();
  if (list.empty() || holdsTensor(list[0])) return {};
  int runs = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    if (holdsTensor(list[i]) && (i == 0 || !holdsTensor(list[i - 1]))) ++runs;
  }
  if (runs != 1) return {};  // indices apart from each other go to the front of the result
  Cut cut = cutWith(a, {0}, 0);
  if (a.size() > 2 && holdsTensor(a[2])) {  // the values of index_put_
    const at::Tensor& values = a[2].toTensor();
    const int64_t rank = a[0].toTensor().dim();
    if (values.dim() > rank) return {};
    if (values.dim() == rank && values.size(0) > 1) cut.dims[2] = 0;
  }
  return {cut};
}

using Rule = Cuts (*)(const OperatorInfo&, Arguments);

const std::unordered_map<std::string, Rule>& rules() {
  static const std::unordered_map<std::string, Rule> known = {
      {"mm", mm},
      {"addmm", addmm},
      {"bmm", bmm},
      {"baddbmm", baddbmm},
      {"mv", mv},
      {"dot", dot},
      {"vdot", dot},
      {"convolution", convolution},
      {"convolution_overrideable", convolution},
      {"convolution_backward", convolutionBackward},
      {"convolution_backward_overrideable", convolutionBackward},
      {"native_layer_norm", layerNorm},
      {"native_layer_norm_backward", layerNormBackward},
      {"embedding", embedding},
      {"index", index},
      {"index_put_", index},
      {"_index_put_impl_", index},
      {"index_put", index},
      {"_softmax", besideDim},
      {"_log_softmax", besideDim},
      {"_softmax_backward_data", besideDim},
      {"_log_softmax_backward_data", besideDim},
      {"cumsum", besideDim},
      {"cumprod", besideDim},
      {"sort", besideDim},
      {"topk", besideDim},
      {"kthvalue", besideDim},
      {"index_select", besideDim},
      {"gather", besideDim},
      {"scatter", besideDim},
      {"scatter_", besideDim},
      {"scatter_add", besideDim},
      {"scatter_add_", besideDim},
      {"index_add_", besideDim},
      {"index_copy_", besideDim},
      {"index_fill_", besideDim}};
  return known;
}

}  // namespace

Cuts cutsOf(const OperatorInfo& info, Arguments arguments) {
  if (arguments.empty()) return {};
  if (isElementwise(info)) return elementwise(arguments);
  const std::string name = baseName(info);
  const auto reduces = reductions().find(name);
  if (reduces != reductions().end()) return reduction(info, arguments, reduces->second);
  const auto rule = rules().find(name);
  if (rule == rules().end() || info.has_out) return {};
  return rule->second(info, arguments);
}

}  // namespace shoal::client
