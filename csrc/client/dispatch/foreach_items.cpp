#include "client/dispatch/foreach_items.h"

#include <ATen/core/Tensor.h>

#include <map>

#include "client/dispatch/dispatch.h"
#include "client/tensor/tensor.h"

namespace shoal::client {
namespace {

// A call's items are on one member, and what they use fits its memory this many times.
constexpr uint64_t kTimesToFit = 4;

bool isPart(const c10::IValue& value, size_t count) {
  return value.isList() && value.toListRef().size() == count;
}

// Bytes that item `i` uses in all lists of the call.
uint64_t itemBytes(c10::ArrayRef<c10::IValue> arguments, size_t count, size_t i) {
  uint64_t bytes = 0;
  for (const auto& argument : arguments) {
    if (!isPart(argument, count)) continue;
    const c10::IValue item = argument.toListRef()[i];
    if (item.isTensor() && item.toTensor().defined()) bytes += item.toTensor().nbytes();
  }
  return bytes;
}

using Positions = std::vector<size_t>;

// The items that go into one call each; empty if all do.
std::vector<Positions> groupItems(c10::ArrayRef<c10::IValue> arguments) {
  const auto items = arguments[0].toListRef();
  std::map<uint32_t, Positions> by_member;
  Session* session = nullptr;
  uint64_t total = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    if (!items[i].isTensor() || !items[i].toTensor().defined() ||
        !items[i].toTensor().device().is_privateuseone()) {
      return {};
    }
    const at::Tensor& tensor = items[i].toTensor();
    if (session == nullptr) session = &sessionOf(tensor);
    uint32_t member = 0;
    if (!session->single() && tensor.device().index() == 0 && baseOf(tensor) != 0) {
      const Member* home = session->home(baseOf(tensor), session->lock());
      if (home != nullptr) member = home->number();
    }
    by_member[member].push_back(i);
    total += tensor.nbytes();
  }
  std::vector<Positions> groups;
  for (const auto& [member, positions] : by_member) {
    const uint64_t limit = session->member(member).options().memory_bytes / kTimesToFit;
    if (total < limit / kTimesToFit) {
      groups.push_back(positions);
      continue;
    }
    uint64_t bytes = UINT64_MAX;  // the first item opens a group
    for (const size_t position : positions) {
      const uint64_t more = itemBytes(arguments, items.size(), position);
      if (bytes == UINT64_MAX || bytes + more > limit) {
        groups.emplace_back();
        bytes = 0;
      }
      groups.back().push_back(position);
      bytes += more;
    }
  }
  return groups;
}

c10::IValue pick(const c10::IValue& list, const std::vector<size_t>& positions) {
  const auto items = list.toListRef();
  c10::impl::GenericList picked(list.toList().elementType());
  picked.reserve(positions.size());
  for (const size_t position : positions) picked.push_back(items[position]);
  return picked;
}

}  // namespace

bool splitItems(const OperatorInfo& info, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, info.argument_count).vec();
  if (arguments.empty() || !arguments[0].isList()) return false;
  const std::vector<Positions> groups = groupItems(arguments);
  if (groups.size() < 2) return false;
  const size_t count = arguments[0].toListRef().size();
  // Every list of the call is as long as the first, or is the same for all items.
  const size_t returns = info.return_of.size();
  std::vector<std::vector<at::Tensor>> results(returns, std::vector<at::Tensor>(count));
  for (const Positions& positions : groups) {
    torch::jit::Stack part;
    for (const auto& argument : arguments) {
      part.push_back(isPart(argument, count) ? pick(argument, positions) : argument);
    }
    dispatchWhole(info, &part);
    for (size_t r = 0; r < returns && r < part.size(); ++r) {
      if (!part[r].isTensorList()) continue;
      const auto items = part[r].toTensorVector();
      for (size_t i = 0; i < items.size() && i < positions.size(); ++i) {
        results[r][positions[i]] = items[i];
      }
    }
  }
  torch::jit::drop(*stack, info.argument_count);
  for (size_t r = 0; r < returns; ++r) {
    const int source = info.return_of[r];
    if (source >= 0) {
      stack->push_back(arguments[static_cast<size_t>(source)]);
    } else {
      stack->push_back(c10::List<at::Tensor>(results[r]));
    }
  }
  return true;
}

}  // namespace shoal::client
