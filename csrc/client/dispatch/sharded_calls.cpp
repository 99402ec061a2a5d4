#include "client/dispatch/sharded_calls.h"

#include <ATen/Functions.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "client/dispatch/dispatch.h"
#include "client/dispatch/split_rules.h"
#include "client/space/transfers.h"
#include "client/tensor/sharded_tensor.h"
#include "client/tensor/tensor.h"

namespace shoal::client {
namespace {

using Arguments = std::vector<c10::IValue>;
using Change = std::function<at::Tensor(const at::Tensor&)>;

bool isTensorList(const c10::IValue& value) {
  return value.isTensorList() || value.isOptionalTensorList();
}

// The argument with every tensor in it replaced.
c10::IValue changeTensors(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const c10::IValue& item : value.toListRef()) list.push_back(change(item.toTensor()));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const c10::IValue& item : value.toListRef()) {
      list.push_back(item.isTensor() ? std::optional(change(item.toTensor())) : std::nullopt);
    }
    return list;
  }
  return value;
}

void eachTensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& look) {
  if (value.isTensor()) {
    look(value.toTensor());
  } else if (isTensorList(value)) {
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor()) look(item.toTensor());
    }
  }
}

// Replaces the call's arguments by its results; what a result is an argument, it is that itself.
void setResults(const OperatorInfo& info, const Arguments& arguments, torch::jit::Stack& from,
                torch::jit::Stack* stack) {
  torch::jit::drop(*stack, info.argument_count);
  for (size_t r = 0; r < from.size(); ++r) {
    const int source = r < info.return_of.size() ? info.return_of[r] : -1;
    stack->push_back(source >= 0 ? arguments[static_cast<size_t>(source)] : std::move(from[r]));
  }
}

// --- operands that lie in one extent each: the call is an ordinary one

bool anyCrosses(const Arguments& arguments) {
  bool crosses = false;
  for (const auto& argument : arguments) {
    eachTensor(argument, [&](const at::Tensor& t) { crosses = crosses || crossesExtents(t); });
  }
  return crosses;
}

at::Tensor inOneExtent(const at::Tensor& tensor) {
  const Extents* extents = extentsOf(tensor);
  return extents == nullptr ? tensor : withinExtent(tensor, *extents);
}

void runWithin(const OperatorInfo& info, const Arguments& arguments, torch::jit::Stack* stack) {
  torch::jit::Stack inner;
  for (const auto& argument : arguments) inner.push_back(changeTensors(argument, inOneExtent));
  dispatchCall(info, &inner);
  setResults(info, arguments, inner, stack);
}

// --- by parts

// Where the parts begin and end: `cuts` in order, with both ends.
std::vector<int64_t> bounds(std::vector<int64_t> cuts, int64_t size) {
  cuts.push_back(0);
  cuts.push_back(size);
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  return cuts;
}

at::Tensor join(std::vector<at::Tensor> parts, Join how, const Cut& cut, const c10::IValue& order) {
  if (how == Join::kCat) return joinBlocks(std::move(parts), cut.out_dim);
  if (how == Join::kSum) {
    at::Tensor sum = parts[0];
    for (size_t i = 1; i < parts.size(); ++i) sum = at::add(sum, parts[i]);
    return sum;
  }
  const at::Tensor all = at::stack(parts, 0);
  switch (how) {
    case Join::kMax:
      return at::amax(all, {0});
    case Join::kMin:
      return at::amin(all, {0});
    case Join::kProd:
      return at::prod(all, 0);
    case Join::kAll:
      return at::all(all, 0);
    case Join::kAny:
      return at::any(all, 0);
    default:
      return at::linalg_vector_norm(all, order.toScalar(), at::IntArrayRef{0});
  }
}

void runParts(const OperatorInfo& info, const Arguments& arguments, const Cut& cut,
              const std::vector<int64_t>& at, torch::jit::Stack* stack) {
  std::vector<std::vector<at::Tensor>> made(info.return_of.size());
  for (size_t k = 0; k + 1 < at.size(); ++k) {
    torch::jit::Stack part;
    for (size_t i = 0; i < arguments.size(); ++i) {
      part.push_back(cut.dims[i] < 0 ? arguments[i]
                                     : c10::IValue(arguments[i].toTensor().narrow(
                                           cut.dims[i], at[k], at[k + 1] - at[k])));
    }
    dispatchCall(info, &part);
    for (size_t r = 0; r < made.size(); ++r) {
      if (info.return_of[r] < 0) made[r].push_back(part[r].toTensor());
    }
  }
  torch::jit::Stack results;
  for (size_t r = 0; r < made.size(); ++r) {
    const Join how = r < cut.joins.size() ? cut.joins[r] : Join::kCat;
    const bool defined = !made[r].empty() && made[r][0].defined();
    const c10::IValue order = arguments.size() > 1 ? arguments[1] : c10::IValue();
    results.emplace_back(defined ? join(std::move(made[r]), how, cut, order) : at::Tensor());
  }
  setResults(info, arguments, results, stack);
}

// The largest operand decides: the call is cut along the dimension in which its memory lies.
bool runCut(const OperatorInfo& info, const Arguments& arguments, torch::jit::Stack* stack) {
  const std::vector<Cut> ways = cutsOf(info, arguments);
  if (ways.empty()) return false;
  std::vector<size_t> wide;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].isTensor() && crossesExtents(arguments[i].toTensor())) wide.push_back(i);
  }
  std::sort(wide.begin(), wide.end(), [&](size_t a, size_t b) {
    return arguments[a].toTensor().numel() > arguments[b].toTensor().numel();
  });
  for (const size_t operand : wide) {
    const int64_t major = majorDim(arguments[operand].toTensor());
    for (const Cut& cut : ways) {
      if (cut.dims[operand] != major) continue;
      std::vector<int64_t> at;
      for (size_t i = 0; i < arguments.size(); ++i) {
        if (cut.dims[i] >= 0) addCuts(arguments[i].toTensor(), cut.dims[i], at);
      }
      if (at.empty()) continue;
      runParts(info, arguments, cut, bounds(at, arguments[operand].toTensor().size(major)), stack);
      return true;
    }
  }
  return false;
}

// --- lists of tensors: each that lies in several extents becomes several

std::vector<int64_t> itemBounds(const Arguments& arguments, size_t count, size_t i) {
  const at::Tensor& first = arguments[0].toListRef()[i].toTensor();
  std::vector<int64_t> cuts;
  const int64_t major = majorDim(first);
  for (const auto& argument : arguments) {
    if (!isTensorList(argument) || argument.toListRef().size() != count) continue;
    const c10::IValue item = argument.toListRef()[i];
    if (item.isTensor() && item.toTensor().defined() && item.toTensor().sizes() == first.sizes() &&
        major >= 0) {
      addCuts(item.toTensor(), major, cuts);
    }
  }
  return cuts.empty() ? cuts : bounds(cuts, first.size(major));
}

struct Piece {
  size_t item;
  int64_t dim = -1;  // -1: the item itself
  int64_t start = 0, length = 0;
};

c10::IValue piecesOf(const c10::IValue& list, const std::vector<Piece>& pieces,
                     const Arguments& arguments) {
  const auto items = list.toListRef();
  c10::impl::GenericList cut(list.toList().elementType());
  for (const Piece& piece : pieces) {
    const c10::IValue& item = items[piece.item];
    const bool same =
        piece.dim >= 0 && item.isTensor() && item.toTensor().defined() &&
        item.toTensor().sizes() == arguments[0].toListRef()[piece.item].toTensor().sizes();
    cut.push_back(same ? c10::IValue(item.toTensor().narrow(piece.dim, piece.start, piece.length))
                       : item);
  }
  return cut;
}

at::Tensor joinItem(const OperatorInfo& info, const Arguments& arguments,
                    std::vector<at::Tensor> parts, int64_t dim) {
  if (parts.size() == 1) return parts[0];
  Cut cut;
  cut.out_dim = dim;
  Join how = Join::kCat;
  if (info.name.find("_foreach_norm") != std::string::npos) how = Join::kNorm;
  if (info.name.find("_foreach_max") != std::string::npos) how = Join::kMax;
  return join(std::move(parts), how, cut, arguments.size() > 1 ? arguments[1] : c10::IValue());
}

bool runItems(const OperatorInfo& info, const Arguments& arguments, torch::jit::Stack* stack) {
  if (!info.foreach_lists || arguments.empty() || !arguments[0].isTensorList()) return false;
  const size_t count = arguments[0].toListRef().size();
  std::vector<Piece> pieces;
  for (size_t i = 0; i < count; ++i) {
    const std::vector<int64_t> at = itemBounds(arguments, count, i);
    const int64_t dim = majorDim(arguments[0].toListRef()[i].toTensor());
    if (at.empty()) pieces.push_back({i});
    for (size_t k = 0; k + 1 < at.size(); ++k) {
      pieces.push_back({i, dim, at[k], at[k + 1] - at[k]});
    }
  }
  if (pieces.size() == count) return false;
  torch::jit::Stack inner;
  for (const auto& argument : arguments) {
    const bool by_item = argument.isList() && argument.toListRef().size() == count;
    inner.push_back(by_item ? piecesOf(argument, pieces, arguments) : argument);
  }
  dispatchCall(info, &inner);
  torch::jit::Stack results;
  for (const auto& result : inner) {
    if (!result.isTensorList()) {
      results.push_back(result);
      continue;
    }
    c10::List<at::Tensor> joined;
    for (size_t k = 0; k < pieces.size();) {
      std::vector<at::Tensor> parts;
      const Piece& first = pieces[k];
      for (; k < pieces.size() && pieces[k].item == first.item; ++k) {
        parts.push_back(result.toListRef()[k].toTensor());
      }
      joined.push_back(joinItem(info, arguments, std::move(parts), first.dim));
    }
    results.emplace_back(std::move(joined));
  }
  setResults(info, arguments, results, stack);
  return true;
}

// --- copies, which every other way is made of

// Same bytes in the same order: they go from extent to extent, and nothing is computed.
bool copyBytes(const Arguments& arguments) {
  const at::Tensor& to = arguments[0].toTensor();
  const at::Tensor& from = arguments[1].toTensor();
  if (!from.device().is_privateuseone() || to.scalar_type() != from.scalar_type() ||
      to.sizes() != from.sizes() || to.strides() != from.strides() ||
      !to.is_non_overlapping_and_dense() || &sessionOf(to) != &sessionOf(from)) {
    return false;
  }
  copyAcross(sessionOf(to), baseOf(to), spanOf(to).start, baseOf(from), spanOf(from).start,
             to.nbytes());
  return true;
}

// --- what torch itself composes of other operators

bool decompose(const OperatorInfo& info, torch::jit::Stack* stack) {
  constexpr auto key = c10::DispatchKey::CompositeExplicitAutograd;
  if (!info.op.hasKernelForDispatchKey(key)) return false;
  info.op.callBoxedForDispatchKey(key, *stack);
  return true;
}

// --- whole, for a moment: if it fits, the operator gets copies

[[noreturn]] void refuse(const OperatorInfo& info, uint64_t bytes, const Session& session) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, info.name, " cannot run by parts, and needs ", bytes,
      " bytes together, more than any device of this lease has (", session.largestMemory(),
      " bytes). Work on slices of the tensor, or lease a device with more memory.");
  __builtin_unreachable();
}

void runWhole(const OperatorInfo& info, const Arguments& arguments, torch::jit::Stack* stack) {
  uint64_t bytes = 0;
  Session* session = nullptr;
  for (const auto& argument : arguments) {
    eachTensor(argument, [&](const at::Tensor& t) {
      if (!crossesExtents(t)) return;
      bytes += static_cast<uint64_t>(t.numel()) * t.itemsize();
      session = &sessionOf(t);
    });
  }
  if (bytes > session->largestMemory()) refuse(info, bytes, *session);
  const WholeSegments whole;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // the operand, and its copy
  torch::jit::Stack inner;
  for (size_t i = 0; i < arguments.size(); ++i) {
    inner.push_back(changeTensors(arguments[i], [&](const at::Tensor& t) {
      if (!crossesExtents(t)) return inOneExtent(t);
      at::Tensor copy = at::empty(t.sizes(), t.options());
      copy.copy_(t);
      if (info.writes[i]) written.emplace_back(t, copy);
      return copy;
    }));
  }
  dispatchCall(info, &inner);
  for (const auto& [operand, copy] : written) {
    TORCH_CHECK(operand.sizes() == copy.sizes(), info.name,
                " resizes a tensor that is larger than any device");
    at::Tensor target = operand;
    target.copy_(copy);
  }
  setResults(info, arguments, inner, stack);
}

}  // namespace

bool runSharded(const OperatorInfo& info, torch::jit::Stack* stack) {
  const Arguments arguments = torch::jit::last(*stack, info.argument_count).vec();
  bool wide = false;
  for (const auto& argument : arguments) {
    eachTensor(argument, [&](const at::Tensor& t) { wide = wide || extentsOf(t) != nullptr; });
  }
  if (!wide) return false;
  if (!anyCrosses(arguments)) {
    runWithin(info, arguments, stack);
    return true;
  }
  if (info.name == "aten::copy_" && copyBytes(arguments)) {
    torch::jit::Stack done{arguments[0]};
    setResults(info, arguments, done, stack);
    return true;
  }
  if (runItems(info, arguments, stack) || runByRows(info, stack) ||
      runCut(info, arguments, stack)) {
    return true;
  }
  if (!decompose(info, stack)) runWhole(info, arguments, stack);
  return true;
}

void runShardedResult(const OperatorInfo& info, torch::jit::Stack* stack, Session& session,
                      const std::vector<OutputMeta>& outputs) {
  if (runByRows(info, stack)) return;
  const Arguments arguments = torch::jit::last(*stack, info.argument_count).vec();
  const auto largest =
      std::max_element(outputs.begin(), outputs.end(),
                       [](const OutputMeta& a, const OutputMeta& b) { return a.bytes < b.bytes; });
  for (const Cut& cut : cutsOf(info, arguments)) {
    if (cut.out_dim < 0 || static_cast<size_t>(cut.out_dim) >= largest->sizes.size()) continue;
    const int64_t size = largest->sizes[static_cast<size_t>(cut.out_dim)];
    const bool outermost = std::all_of(largest->sizes.begin(), largest->sizes.begin() + cut.out_dim,
                                       [](int64_t n) { return n == 1; });
    if (size < 2 || !outermost) continue;
    const uint64_t each = largest->bytes / static_cast<uint64_t>(size);
    auto rows = static_cast<int64_t>(std::max<uint64_t>(1, extentBytesMax(session) / each));
    if (rows >= 16) rows -= rows % 16;
    std::vector<int64_t> at;
    for (int64_t row = rows; row < size; row += rows) at.push_back(row);
    return runParts(info, arguments, cut, bounds(at, size), stack);
  }
  if (decompose(info, stack)) return;
  if (largest->bytes > session.largestMemory()) refuse(info, largest->bytes, session);
  const WholeSegments whole;
  dispatchWhole(info, stack);
}

}  // namespace shoal::client
