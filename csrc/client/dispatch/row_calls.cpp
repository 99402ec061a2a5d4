// Operators on wide tensors that pick rows by number.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/List.h>

#include <algorithm>

#include "client/dispatch/special_cases.h"
#include "client/tensor/sharded_tensor.h"
#include "client/tensor/tensor.h"

namespace shoal::client {
namespace {

// Row numbers as one line.
at::Tensor flatIndex(const at::Tensor& index) {
  TORCH_CHECK(index.scalar_type() == at::kLong || index.scalar_type() == at::kInt,
              "Expected dtype int32 or int64 for index");
  return index.reshape({-1}).to(at::kLong);
}

// As in Python: negative numbers count from the end.
at::Tensor fromStart(const at::Tensor& index, int64_t size) {
  return at::where(index.lt(0), index + size, index);
}

// Which of the numbers are in these rows.
at::Tensor chosen(const at::Tensor& index, const Rows& rows) {
  return at::logical_and(index.ge(rows.start), index.lt(rows.start + rows.count))
      .nonzero()
      .squeeze(1);
}

enum class Raises { kIndexError, kRuntimeError };  // torch's operators differ in that

// Raises what local torch raises for a number outside of [least, size), before anything is written.
// It waits for the device; so do all who share numbers out among blocks.
void checkIndex(const at::Tensor& index, int64_t least, int64_t size, Raises raises) {
  const at::Tensor outside = index.masked_select(at::logical_or(index.lt(least), index.ge(size)));
  if (outside.numel() == 0) return;
  const std::string text =
      c10::str("index out of range in self: index ", outside[0].item<int64_t>(),
               " is out of bounds for dimension 0", " with size ", size);
  TORCH_CHECK_INDEX(raises != Raises::kIndexError, text);
  TORCH_CHECK(false, text);
}

// --- reading rows

at::Tensor takeRows(const at::Tensor& self, const at::Tensor& index) {
  auto sizes = self.sizes().vec();
  const at::Tensor flat = flatIndex(index);
  checkIndex(flat, 0, self.size(0), Raises::kIndexError);
  sizes[0] = flat.numel();
  at::Tensor out = at::empty(sizes, self.options());
  for (const Rows& rows : rowsOf(self)) {
    const at::Tensor where = chosen(flat, rows);
    if (where.numel() == 0) continue;
    const at::Tensor local = flat.index_select(0, where) - rows.start;
    out.index_copy_(0, where, rows.block.index_select(0, local));
  }
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
  TORCH_CHECK_INDEX(a[2].toTensor().dim() <= 1, "index_select(): Index is supposed to be a vector");
  return Tensors{takeRows(self, a[2].toTensor())};
}

void checkMask(const at::Tensor& mask, const at::Tensor& self, int64_t at) {
  for (int64_t d = 0; d < mask.dim() && at + d < self.dim(); ++d) {
    TORCH_CHECK_INDEX(mask.size(d) == self.size(at + d), "The shape of the mask ", mask.sizes(),
                      " at index ", d, " does not match the shape of the indexed tensor ",
                      self.sizes(), " at index ", at + d);
  }
}

// The index tensors of `x[i, j, …]`, all of one length; empty if they are not the first dimensions.
// Numbers of the first are rows; those of others are the operator's to check, block by block.
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
      checkMask(index, self, dim);
      for (const at::Tensor& places : index.nonzero().unbind(1)) found.push_back(places);
      dim += index.dim();
    } else {
      if (dim == 0) checkIndex(index, -self.size(0), self.size(0), Raises::kIndexError);
      found.push_back(dim == 0 ? fromStart(index, self.size(0)) : index);
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
  for (const Rows& rows : all) {
    const at::Tensor where = chosen(first, rows);
    if (where.numel() == 0) continue;
    out.index_copy_(0, where, at::index(rows.block, indexList(indices, where, rows)));
  }
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
  const at::Tensor known = at::logical_and(index.ge(0), index.lt(self.size(0)));
  for (const Rows& rows : all) {
    const at::Tensor local = index - rows.start;
    const at::Tensor inside = at::logical_and(local.ge(0), local.lt(rows.count));
    at::Tensor places = local.clamp(0, rows.count - 1);
    // A number that is no row's goes to the first block as it is: there the operator refuses it on
    // the device, and nobody waits here.
    if (rows.start == 0) places = at::where(known, places, index);
    out = at::where(inside, rows.block.gather(0, places), out);
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
  for (const Rows& rows : all) {
    const at::Tensor where = chosen(first, rows);
    if (where.numel() == 0) continue;
    at::Tensor block = rows.block;
    at::index_put_(block, indexList(indices, where, rows), values.index_select(0, where),
                   a[3].toBool());
  }
  return Tensors{self};
}

// index_add_, index_copy_ and index_fill_ along the first dimension: `write(block, index, which)`.
template <typename Write>
Done eachIndexed(const Arguments& a, bool from_end, Raises raises, const Write& write) {
  at::Tensor self = a[0].toTensor();
  const std::vector<Rows> all = rowsOf(self);
  if (all.empty() || wrapped(a[1].toInt(), self.dim()) != 0) return {};
  const int64_t size = self.size(0);
  at::Tensor flat = flatIndex(a[2].toTensor());
  checkIndex(flat, from_end ? -size : 0, size, raises);
  if (from_end) flat = fromStart(flat, size);
  for (const Rows& rows : all) {
    const at::Tensor where = chosen(flat, rows);
    if (where.numel() == 0) continue;
    at::Tensor block = rows.block;
    write(block, flat.index_select(0, where) - rows.start, where);
  }
  return Tensors{self};
}

Done indexAdd(const Arguments& a) {
  const auto add = [&](at::Tensor& block, const at::Tensor& at, const at::Tensor& which) {
    block.index_add_(0, at, a[3].toTensor().index_select(0, which), a[4].toScalar());
  };
  return eachIndexed(a, /*from_end=*/false, Raises::kRuntimeError, add);
}

Done indexCopy(const Arguments& a) {
  const auto copy = [&](at::Tensor& block, const at::Tensor& at, const at::Tensor& which) {
    block.index_copy_(0, at, a[3].toTensor().index_select(0, which));
  };
  return eachIndexed(a, /*from_end=*/false, Raises::kIndexError, copy);
}

Done indexFill(const Arguments& a) {
  const auto fill = [&](at::Tensor& block, const at::Tensor& at, const at::Tensor&) {
    if (a[3].isTensor()) {
      block.index_fill_(0, at, a[3].toTensor());
    } else {
      block.index_fill_(0, at, a[3].toScalar());
    }
  };
  return eachIndexed(a, /*from_end=*/true, Raises::kIndexError, fill);
}

// scatter_ and scatter_add_ along the first dimension.
Done scatterInto(const Arguments& a, bool accumulate) {
  at::Tensor self = a[0].toTensor();
  const std::vector<Rows> all = rowsOf(self);
  if (all.empty() || wrapped(a[1].toInt(), self.dim()) != 0) return {};
  const at::Tensor& index = a[2].toTensor();
  const bool number = !a[3].isTensor();
  checkIndex(index, 0, self.size(0), Raises::kRuntimeError);
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
  auto step = static_cast<int64_t>(std::max<uint64_t>(1, extentBytesMax(session) / row));
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

}  // namespace

const Ways& rowWays() {
  static const Ways known = {{"aten::embedding", embedding},
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
                             {"aten::scatter_add", onCopy<scatterAdd>}};
  return known;
}

}  // namespace shoal::client
