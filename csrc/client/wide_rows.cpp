// Operators on wide tensors that are no plain cut: those that pick rows by number, and those whose
// parts depend on one another.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <unordered_map>

#include "client/tensor.h"
#include "client/wide.h"
#include "client/wide_rules.h"

namespace shoal::client {
namespace {

using Stack = torch::jit::Stack;
using Arguments = std::vector<c10::IValue>;
using Tensors = std::vector<at::Tensor>;
using Done = std::optional<Tensors>;  // nothing: this call is not of the kind

struct Rows {
  int64_t start, count;
  at::Tensor block;
};

// The tensor by extents along its first dimension; empty if it does not lie in several that way.
std::vector<Rows> rowsOf(const at::Tensor& tensor) {
  std::vector<int64_t> cuts{0};
  if (!crossesExtents(tensor) || majorDim(tensor) != 0) return {};
  addCuts(tensor, 0, cuts);
  cuts.push_back(tensor.size(0));
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  std::vector<Rows> rows;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const int64_t count = cuts[i + 1] - cuts[i];
    rows.push_back({cuts[i], count, tensor.narrow(0, cuts[i], count)});
  }
  return rows;
}

int64_t wrapped(int64_t dim, int64_t rank) {
  return dim < 0 ? dim + std::max<int64_t>(rank, 1) : dim;
}

// Row numbers as one line of positive ones.
at::Tensor flatIndex(const at::Tensor& index, int64_t size) {
  const at::Tensor flat = index.reshape({-1}).to(at::kLong);
  return at::where(flat.lt(0), flat + size, flat);
}

// Which of the numbers are in these rows.
at::Tensor chosen(const at::Tensor& index, const Rows& rows) {
  return at::logical_and(index.ge(rows.start), index.lt(rows.start + rows.count))
      .nonzero()
      .squeeze(1);
}

void checkAllFound(int64_t found, const at::Tensor& index) {
  TORCH_CHECK_INDEX(found == index.numel(), "index out of range in self");
}

// --- reading rows

at::Tensor takeRows(const at::Tensor& self, const at::Tensor& index) {
  auto sizes = self.sizes().vec();
  const at::Tensor flat = flatIndex(index, self.size(0));
  sizes[0] = flat.numel();
  at::Tensor out = at::empty(sizes, self.options());
  int64_t found = 0;
  for (const Rows& rows : rowsOf(self)) {
    const at::Tensor where = chosen(flat, rows);
    if (where.numel() == 0) continue;
    found += where.numel();
    const at::Tensor local = flat.index_select(0, where) - rows.start;
    out.index_copy_(0, where, rows.block.index_select(0, local));
  }
  checkAllFound(found, flat);
  return out;
}

at::Tensor asRows(const at::Tensor& taken, const at::Tensor& index, const at::Tensor& self) {
  auto sizes = index.sizes().vec();
  sizes.insert(sizes.end(), self.sizes().begin() + 1, self.sizes().end());
  return taken.view(sizes);
}

Done embedding(const Arguments& a) {
  const at::Tensor& weight = a[0].toTensor();
  if (rowsOf(weight).empty()) return {};
  return Tensors{asRows(takeRows(weight, a[1].toTensor()), a[1].toTensor(), weight)};
}

Done indexSelect(const Arguments& a) {
  const at::Tensor& self = a[0].toTensor();
  if (rowsOf(self).empty() || wrapped(a[1].toInt(), self.dim()) != 0) return {};
  return Tensors{takeRows(self, a[2].toTensor())};
}

// The index tensors of `x[i, j, …]`, all of one length; empty if they are not the first dimensions.
Tensors leadingIndices(const c10::IValue& list, const at::Tensor& self) {
  Tensors found;
  bool ended = false;
  int64_t dim = 0;
  for (const c10::IValue& item : list.toListRef()) {
    if (!item.isTensor() || !item.toTensor().defined()) {
      ended = true;
      continue;
    }
    if (ended) return {};
    at::Tensor index = item.toTensor();
    if (!index.device().is_privateuseone()) index = index.to(self.device());
    if (index.scalar_type() == at::kBool) {
      for (const at::Tensor& places : index.nonzero().unbind(1)) found.push_back(places);
      dim += index.dim();
    } else {
      found.push_back(at::where(index.lt(0), index + self.size(dim), index));
      ++dim;
    }
  }
  return found.empty() ? found : at::broadcast_tensors(found);
}

c10::List<std::optional<at::Tensor>> indexList(const Tensors& indices, const at::Tensor& where,
                                               const Rows& rows) {
  c10::List<std::optional<at::Tensor>> list;
  for (size_t i = 0; i < indices.size(); ++i) {
    const at::Tensor picked = indices[i].reshape({-1}).index_select(0, where);
    list.push_back(i == 0 ? picked - rows.start : picked);
  }
  return list;
}

Done index(const Arguments& a) {
  const at::Tensor& self = a[0].toTensor();
  const std::vector<Rows> all = rowsOf(self);
  if (all.empty()) return {};
  const Tensors indices = leadingIndices(a[1], self);
  if (indices.empty()) return {};
  const at::Tensor first = indices[0].reshape({-1});
  const auto inner = self.sizes().slice(indices.size());
  std::vector<int64_t> sizes{first.numel()};
  sizes.insert(sizes.end(), inner.begin(), inner.end());
  at::Tensor out = at::empty(sizes, self.options());
  int64_t found = 0;
  for (const Rows& rows : all) {
    const at::Tensor where = chosen(first, rows);
    if (where.numel() == 0) continue;
    found += where.numel();
    out.index_copy_(0, where, at::index(rows.block, indexList(indices, where, rows)));
  }
  checkAllFound(found, first);
  sizes = indices[0].sizes().vec();
  sizes.insert(sizes.end(), inner.begin(), inner.end());
  return Tensors{out.view(sizes)};
}

Done gather(const Arguments& a) {
  const at::Tensor& self = a[0].toTensor();
  const at::Tensor& index = a[2].toTensor();
  const std::vector<Rows> all = rowsOf(self);
  if (all.empty() || wrapped(a[1].toInt(), self.dim()) != 0) return {};
  at::Tensor out = at::empty(index.sizes(), self.options());
  for (const Rows& rows : all) {
    const at::Tensor local = index - rows.start;
    const at::Tensor inside = at::logical_and(local.ge(0), local.lt(rows.count));
    const at::Tensor picked = rows.block.gather(0, local.clamp(0, rows.count - 1));
    out = at::where(inside, picked, out);
  }
  return Tensors{out};
}

Done nonzero(const Arguments& a) {
  const std::vector<Rows> all = rowsOf(a[0].toTensor());
  if (all.empty()) return {};
  Tensors found;
  for (const Rows& rows : all) {
    at::Tensor here = rows.block.nonzero();
    here.select(1, 0).add_(rows.start);
    found.push_back(here);
  }
  return Tensors{at::cat(found, 0)};
}

Done maskedSelect(const Arguments& a) {
  const at::Tensor& self = a[0].toTensor();
  const std::vector<Rows> all = rowsOf(self);
  const at::Tensor& mask = a[1].toTensor();
  if (all.empty() || mask.sizes() != self.sizes()) return {};
  Tensors found;
  for (const Rows& rows : all) {
    found.push_back(rows.block.masked_select(mask.narrow(0, rows.start, rows.count)));
  }
  return Tensors{at::cat(found, 0)};
}

// --- writing rows

Done indexPut(const Arguments& a) {
  at::Tensor self = a[0].toTensor();
  const std::vector<Rows> all = rowsOf(self);
  if (all.empty()) return {};
  const Tensors indices = leadingIndices(a[1], self);
  if (indices.empty()) return {};
  const at::Tensor first = indices[0].reshape({-1});
  auto sizes = indices[0].sizes().vec();
  const auto inner = self.sizes().slice(indices.size());
  sizes.insert(sizes.end(), inner.begin(), inner.end());
  std::vector<int64_t> flat{first.numel()};
  flat.insert(flat.end(), inner.begin(), inner.end());
  const at::Tensor values = a[2].toTensor().to(self.device()).expand(sizes).reshape(flat);
  int64_t found = 0;
  for (const Rows& rows : all) {
    const at::Tensor where = chosen(first, rows);
    if (where.numel() == 0) continue;
    found += where.numel();
    at::Tensor block = rows.block;
    at::index_put_(block, indexList(indices, where, rows), values.index_select(0, where),
                   a[3].toBool());
  }
  checkAllFound(found, first);
  return Tensors{self};
}

// index_add_, index_copy_ and index_fill_ along the first dimension: `write(block, index, which)`.
template <typename Write>
Done eachIndexed(const Arguments& a, const Write& write) {
  at::Tensor self = a[0].toTensor();
  const std::vector<Rows> all = rowsOf(self);
  if (all.empty() || wrapped(a[1].toInt(), self.dim()) != 0) return {};
  const at::Tensor flat = flatIndex(a[2].toTensor(), self.size(0));
  int64_t found = 0;
  for (const Rows& rows : all) {
    const at::Tensor where = chosen(flat, rows);
    if (where.numel() == 0) continue;
    found += where.numel();
    at::Tensor block = rows.block;
    write(block, flat.index_select(0, where) - rows.start, where);
  }
  checkAllFound(found, flat);
  return Tensors{self};
}

Done indexAdd(const Arguments& a) {
  return eachIndexed(a, [&](at::Tensor& block, const at::Tensor& at, const at::Tensor& which) {
    block.index_add_(0, at, a[3].toTensor().index_select(0, which), a[4].toScalar());
  });
}

Done indexCopy(const Arguments& a) {
  return eachIndexed(a, [&](at::Tensor& block, const at::Tensor& at, const at::Tensor& which) {
    block.index_copy_(0, at, a[3].toTensor().index_select(0, which));
  });
}

Done indexFill(const Arguments& a) {
  return eachIndexed(a, [&](at::Tensor& block, const at::Tensor& at, const at::Tensor&) {
    if (a[3].isTensor()) {
      block.index_fill_(0, at, a[3].toTensor());
    } else {
      block.index_fill_(0, at, a[3].toScalar());
    }
  });
}

// scatter_ and scatter_add_ along the first dimension.
Done scatterInto(const Arguments& a, bool accumulate) {
  at::Tensor self = a[0].toTensor();
  const std::vector<Rows> all = rowsOf(self);
  if (all.empty() || wrapped(a[1].toInt(), self.dim()) != 0) return {};
  const at::Tensor& index = a[2].toTensor();
  const bool number = !a[3].isTensor();
  for (const Rows& rows : all) {
    const at::Tensor places =
        at::logical_and(index.ge(rows.start), index.lt(rows.start + rows.count)).nonzero();
    if (places.size(0) == 0) continue;
    c10::List<std::optional<at::Tensor>> coordinates;
    for (int64_t d = 0; d < index.dim(); ++d) coordinates.push_back(places.select(1, d));
    const at::Tensor values = number ? at::full({places.size(0)}, a[3].toScalar(), self.options())
                                     : at::index(a[3].toTensor(), coordinates);
    coordinates.set(0, at::index(index, coordinates) - rows.start);
    at::Tensor block = rows.block;
    at::index_put_(block, coordinates, values, accumulate);
  }
  return Tensors{self};
}

Done scatter(const Arguments& a) {
  return a.size() > 4 ? Done() : scatterInto(a, false);  // with reduce=…: not by rows
}

Done scatterAdd(const Arguments& a) {
  return scatterInto(a, true);
}

// The functional kind: a copy is written to.
template <Done (*InPlace)(const Arguments&)>
Done onCopy(const Arguments& a) {
  if (rowsOf(a[0].toTensor()).empty()) return {};
  Arguments copied = a;
  copied[0] = a[0].toTensor().clone();
  return InPlace(copied);
}

Done embeddingBackward(const Arguments& a) {
  const at::Tensor& grad = a[0].toTensor();
  const at::Tensor& indices = a[1].toTensor();
  const int64_t total = a[2].toInt();
  const int64_t padding = a[3].toInt();
  Session& session = sessionOf(grad);
  const uint64_t row = static_cast<uint64_t>(grad.size(-1)) * grad.itemsize();
  if (static_cast<uint64_t>(total) * row <= session.wholeBytesMax()) return {};
  auto step = static_cast<int64_t>(std::max<uint64_t>(1, session.extentBytes() / row));
  if (step >= 16) step -= step % 16;
  Tensors blocks;
  for (int64_t start = 0; start < total; start += step) {
    const int64_t count = std::min(step, total - start);
    const at::Tensor local = indices - start;
    at::Tensor outside = at::logical_or(local.lt(0), local.ge(count));
    if (padding >= 0) outside = at::logical_or(outside, indices.eq(padding));
    // One row more, for what belongs elsewhere: it gets no gradient.
    blocks.push_back(at::embedding_dense_backward(grad, local.masked_fill(outside, count),
                                                  count + 1, count, a[4].toBool())
                         .narrow(0, 0, count));
  }
  return Tensors{joinBlocks(std::move(blocks), 0)};
}

// --- parts that depend on one another

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

using Way = Done (*)(const Arguments&);

const std::unordered_map<std::string, Way>& ways() {
  static const std::unordered_map<std::string, Way> known = {
      {"aten::embedding", embedding},
      {"aten::embedding_dense_backward", embeddingBackward},
      {"aten::index_select", indexSelect},
      {"aten::index.Tensor", index},
      {"aten::gather", gather},
      {"aten::nonzero", nonzero},
      {"aten::masked_select", maskedSelect},
      {"aten::index_put_", indexPut},
      {"aten::_index_put_impl_", indexPut},
      {"aten::index_put", onCopy<indexPut>},
      {"aten::index_add_", indexAdd},
      {"aten::index_add", onCopy<indexAdd>},
      {"aten::index_copy_", indexCopy},
      {"aten::index_copy", onCopy<indexCopy>},
      {"aten::index_fill_.int_Scalar", indexFill},
      {"aten::index_fill_.int_Tensor", indexFill},
      {"aten::scatter_.src", scatter},
      {"aten::scatter_.value", scatter},
      {"aten::scatter.src", onCopy<scatter>},
      {"aten::scatter.value", onCopy<scatter>},
      {"aten::scatter_add_", scatterAdd},
      {"aten::scatter_add", onCopy<scatterAdd>},
      {"aten::mean", mean},
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

}  // namespace

bool runByRows(const OperatorInfo& info, Stack* stack) {
  const auto way = ways().find(info.name);
  if (way == ways().end()) return false;
  const Done done = way->second(torch::jit::last(*stack, info.argument_count).vec());
  if (!done.has_value()) return false;
  torch::jit::drop(*stack, info.argument_count);
  for (const at::Tensor& result : *done) stack->emplace_back(result);
  return true;
}

}  // namespace shoal::client
