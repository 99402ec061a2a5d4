#include "client/dispatch/special_cases.h"

#include <algorithm>

#include "client/call/output_shapes.h"
#include "client/dispatch/split_rules.h"
#include "client/tensor/sharded_tensor.h"

namespace shoal::client {

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

bool runByRows(const OperatorInfo& info, torch::jit::Stack* stack) {
  const auto row = rowWays().find(info.name);
  const auto dependent = dependentWays().find(info.name);
  if (row == rowWays().end() && dependent == dependentWays().end()) return false;
  const Way way = row != rowWays().end() ? row->second : dependent->second;
  if (row != rowWays().end()) {
    // Its blocks do not see the operands as a whole, so wrong shapes are found before them.
    std::vector<OutputMeta> outputs;
    inferOutputs(info, torch::jit::last(*stack, info.argument_count), outputs);
  }
  const Done done = way(torch::jit::last(*stack, info.argument_count).vec());
  if (!done.has_value()) return false;
  torch::jit::drop(*stack, info.argument_count);
  for (const at::Tensor& result : *done) stack->emplace_back(result);
  return true;
}

}  // namespace shoal::client
