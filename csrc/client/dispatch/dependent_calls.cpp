// Operators on wide tensors whose parts depend on one another: what is done of each block is put
// together afterwards.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>

#include "client/dispatch/special_cases.h"
#include "client/dispatch/split_rules.h"
#include "client/tensor/sharded_tensor.h"
#include "client/tensor/tensor.h"

namespace shoal::client {
namespace {

std::vector<int64_t> dimsOf(const c10::IValue& value, int64_t rank) {
  std::vector<int64_t> dims;
  if (value.isInt()) dims = {value.toInt()};
  if (value.isIntList()) dims = value.toIntVector();
  if (dims.empty()) {
    for (int64_t d = 0; d < rank; ++d) dims.push_back(d);
  }
  for (int64_t& dim : dims) dim = wrapped(dim, rank);
  return dims;
}

bool reducesRows(const at::Tensor& self, const std::vector<int64_t>& dims) {
  return crossesExtents(self) && std::find(dims.begin(), dims.end(), majorDim(self)) != dims.end();
}

int64_t countOf(const at::Tensor& self, const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (const int64_t dim : dims) count *= self.size(dim);
  return count;
}

std::optional<c10::ScalarType> dtypeOf(const c10::IValue& value) {
  return value.isNone() ? std::nullopt : std::optional(value.toScalarType());
}

Done mean(const Arguments& a) {  // (self, dtype) or (self, dim, keepdim, dtype)
  const at::Tensor& self = a[0].toTensor();
  const bool all = a.size() == 2;
  const std::vector<int64_t> dims = dimsOf(all ? c10::IValue() : a[1], self.dim());
  if (!reducesRows(self, dims)) return {};
  const at::Tensor sum = at::sum(self, dims, !all && a[2].toBool(), dtypeOf(all ? a[1] : a[3]));
  return Tensors{sum.div(countOf(self, dims))};
}

// The variance and the mean over `dims`, in two passes.
std::pair<at::Tensor, at::Tensor> variance(const Arguments& a) {
  const at::Tensor& self = a[0].toTensor();
  const std::vector<int64_t> dims = dimsOf(a[1], self.dim());
  const bool keepdim = a[3].toBool();
  const double correction = a[2].isNone() ? 1.0 : a[2].toScalar().toDouble();
  const auto count = static_cast<double>(countOf(self, dims));
  const at::Tensor mean = at::sum(self, dims, /*keepdim=*/true).div(count);
  const at::Tensor squares = at::sum((self - mean).square_(), dims, keepdim);
  return {squares.div(std::max(count - correction, 0.0)),
          keepdim ? mean : mean.reshape(squares.sizes())};
}

bool variesOverRows(const Arguments& a) {
  const at::Tensor& self = a[0].toTensor();
  return a.size() == 4 && !self.is_complex() && reducesRows(self, dimsOf(a[1], self.dim()));
}

Done var(const Arguments& a) {
  if (!variesOverRows(a)) return {};
  return Tensors{variance(a).first};
}

Done standardDeviation(const Arguments& a) {
  if (!variesOverRows(a)) return {};
  return Tensors{variance(a).first.sqrt_()};
}

Done varMean(const Arguments& a) {
  if (!variesOverRows(a)) return {};
  const auto [of, around] = variance(a);
  return Tensors{of, around};
}

// The largest (or smallest) of each column and its row: of each block first, then among those.
template <bool kLargest>
Done extremeAlong(const Arguments& a) {
  const at::Tensor& self = a[0].toTensor();
  const std::vector<Rows> all = rowsOf(self);
  if (all.empty() || a.size() != 3 || wrapped(a[1].toInt(), self.dim()) != 0) return {};
  Tensors values, places;
  for (const Rows& rows : all) {
    const auto [value, place] =
        kLargest ? at::max(rows.block, 0, true) : at::min(rows.block, 0, true);
    values.push_back(value);
    places.push_back(place + rows.start);
  }
  const at::Tensor candidates = at::cat(values, 0);
  const auto [value, block] =
      kLargest ? at::max(candidates, 0, true) : at::min(candidates, 0, true);
  const at::Tensor place = at::cat(places, 0).gather(0, block);
  const bool keepdim = a[2].toBool();
  return Tensors{keepdim ? value : value.squeeze(0), keepdim ? place : place.squeeze(0)};
}

template <bool kLargest>
Done placeOfExtreme(const Arguments& a) {  // argmax, argmin: (self, dim, keepdim)
  const at::Tensor& self = a[0].toTensor();
  if (rowsOf(self).empty()) return {};
  if (!a[1].isNone()) {
    const Done both = extremeAlong<kLargest>({a[0], a[1], a[2]});
    return both.has_value() ? Done(Tensors{both->at(1)}) : Done();
  }
  if (!self.is_contiguous()) return {};
  const at::Tensor flat = self.view({-1});
  const Done both = extremeAlong<kLargest>({flat, int64_t{0}, false});
  if (!both.has_value()) return {};
  const at::Tensor place = both->at(1);
  return Tensors{a[2].toBool() ? place.reshape(std::vector<int64_t>(self.dim(), 1)) : place};
}

// beta * self + alpha * (mat1 @ mat2) where the inner dimension is the one that is cut.
Done addmm(const Arguments& a) {
  const at::Tensor& mat1 = a[1].toTensor();
  const at::Tensor& mat2 = a[2].toTensor();
  const bool inner = (crossesExtents(mat1) && majorDim(mat1) == 1) ||
                     (crossesExtents(mat2) && majorDim(mat2) == 0);
  if (!inner) return {};
  return Tensors{
      at::mm(mat1, mat2).mul_(a[4].toScalar()).add_(a[0].toTensor().mul(a[3].toScalar()))};
}

Done cumulativeSum(const Arguments& a) {
  const at::Tensor& self = a[0].toTensor();
  const std::vector<Rows> all = rowsOf(self);
  if (all.empty() || a.size() != 3 || wrapped(a[1].toInt(), self.dim()) != 0) return {};
  Tensors blocks;
  at::Tensor carry;
  for (const Rows& rows : all) {
    at::Tensor sums = at::cumsum(rows.block, 0, dtypeOf(a[2]));
    if (carry.defined()) sums.add_(carry);
    carry = sums.narrow(0, rows.count - 1, 1).clone();
    blocks.push_back(std::move(sums));
  }
  return Tensors{joinBlocks(std::move(blocks), 0)};
}

// Bytes of tensors put together; if too many, or one crosses extents, it is done by copies.
bool mustCat(const Tensors& items) {
  uint64_t bytes = 0;
  bool crosses = false;
  for (const at::Tensor& item : items) {
    bytes += static_cast<uint64_t>(item.numel()) * item.itemsize();
    crosses = crosses || crossesExtents(item);
  }
  if (items.empty() || !items[0].device().is_privateuseone()) return false;
  return crosses || (bytes > sessionOf(items[0]).wholeBytesMax() && !WholeSegments::wanted());
}

Done cat(const Arguments& a) {
  Tensors items;
  for (const at::Tensor& item : a[0].toTensorVector()) {
    if (item.dim() != 1 || item.size(0) != 0) items.push_back(item);  // an old habit: no shape
  }
  if (!mustCat(items)) return {};
  const int64_t dim = wrapped(a[1].toInt(), items[0].dim());
  auto sizes = items[0].sizes().vec();
  auto& size = sizes[static_cast<size_t>(dim)];
  size = 0;
  auto dtype = items[0].scalar_type();
  for (const at::Tensor& item : items) {
    size += item.size(dim);
    dtype = c10::promoteTypes(dtype, item.scalar_type());
  }
  at::Tensor out = at::empty(sizes, items[0].options().dtype(dtype));
  int64_t start = 0;
  for (const at::Tensor& item : items) {
    out.narrow(dim, start, item.size(dim)).copy_(item);
    start += item.size(dim);
  }
  return Tensors{out};
}

Done flip(const Arguments& a) {
  const at::Tensor& self = a[0].toTensor();
  std::vector<Rows> all = rowsOf(self);
  const std::vector<int64_t> dims = dimsOf(a[1], self.dim());
  if (all.empty()) return {};
  if (std::find(dims.begin(), dims.end(), 0) != dims.end()) std::reverse(all.begin(), all.end());
  Tensors blocks;
  for (const Rows& rows : all) blocks.push_back(rows.block.flip(dims));
  return Tensors{joinBlocks(std::move(blocks), 0)};
}

Done stack(const Arguments& a) {
  Tensors items = a[0].toTensorVector();
  if (!mustCat(items)) return {};
  const int64_t dim = wrapped(a[1].toInt(), items[0].dim() + 1);
  for (at::Tensor& item : items) item = item.unsqueeze(dim);
  return Tensors{at::cat(items, dim)};
}

}  // namespace

const Ways& dependentWays() {
  static const Ways known = {{"aten::mean", mean},
                             {"aten::mean.dim", mean},
                             {"aten::var.correction", var},
                             {"aten::std.correction", standardDeviation},
                             {"aten::var_mean.correction", varMean},
                             {"aten::max.dim", extremeAlong<true>},
                             {"aten::min.dim", extremeAlong<false>},
                             {"aten::argmax", placeOfExtreme<true>},
                             {"aten::argmin", placeOfExtreme<false>},
                             {"aten::addmm", addmm},
                             {"aten::cumsum", cumulativeSum},
                             {"aten::cat", cat},
                             {"aten::flip", flip},
                             {"aten::stack", stack}};
  return known;
}

}  // namespace shoal::client
