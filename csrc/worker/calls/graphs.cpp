// Recorded calls: the worker keeps their autograd graph, and runs it backwards when the client
// asks.
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd.h>

#include "base/clock.h"
#include "wire/limits.h"
#include "worker/calls/calls.h"
#include "worker/calls/tensors.h"

namespace shoal::worker {

using wire::ProtocolError;

void Calls::keepGraph(uint64_t graph, Run& run, const CallRow& row) {
  if (graphs_.size() >= wire::kGraphsMax) throw ProtocolError("too many graphs are alive");
  Graph& kept = graphs_[graph];
  kept = Graph();
  kept.row = profile_.backwardRow(row);
  kept.leaves = std::move(run.leaves);
  for (auto& result : run.stack) {
    TORCH_CHECK(result.isTensor(), "only operators that return tensors can be recorded");
    kept.outputs.push_back(result.toTensor());
    // The client gets the value. The graph keeps the variable.
    result = result.toTensor().detach();
  }
}

void Calls::backward(const wire::Backward& message, uint64_t sequence) {
  const auto found = graphs_.find(message.graph);
  if (found == graphs_.end()) throw ProtocolError("the graph is not there any more");
  Graph& graph = found->second;
  const wire::Words gradients = message.gradients, addresses = message.outputs;
  if (gradients.size() != graph.outputs.size() || addresses.size() != graph.leaves.size()) {
    throw ProtocolError("the gradients do not match the graph");
  }
  operator_name_ = "backward";
  segments_.useAnything();  // what the recorded call has kept
  try {
    std::shared_ptr<const Failure> poisoned;
    std::vector<at::Tensor> outputs;
    std::vector<at::Tensor> seeds;
    for (size_t i = 0; i < graph.outputs.size(); ++i) {
      if (gradients[i] == 0 || !graph.outputs[i].requires_grad()) continue;
      Shape shape = shapeOf(graph.outputs[i].contiguous());
      shape.item_bytes = graph.outputs[i].itemsize();
      shape.span_bytes = graph.outputs[i].numel() * shape.item_bytes;
      outputs.push_back(graph.outputs[i]);
      seeds.push_back(tensorAt(gradients[i], shape, false, poisoned));
    }
    if (poisoned != nullptr) return poison(addresses, poisoned);
    const AboveAutograd above;
    const int64_t start = nowNs();
    const auto found_gradients =
        torch::autograd::grad(outputs, graph.leaves, seeds, /*retain_graph=*/true,
                              /*create_graph=*/false, /*allow_unused=*/true);
    const int64_t took_ns = nowNs() - start;
    busy_ns_ += took_ns;
    graph.row.count(nullptr, took_ns);
    if (speed_ < 1.0) throttle(took_ns);
    const at::AutoDispatchBelowADInplaceOrView below;
    for (size_t i = 0; i < graph.leaves.size(); ++i) {
      const at::Tensor& leaf = graph.leaves[i];
      const at::Tensor gradient = found_gradients[i].defined()
                                      ? found_gradients[i].contiguous()
                                      : at::zeros(leaf.sizes(), leaf.options());
      Shape shape = shapeOf(gradient);
      shape.span_bytes = static_cast<int64_t>(gradient.nbytes());
      bindOutput(shape, gradient, addresses[i]);
    }
  } catch (...) {
    poison(addresses, describe(std::current_exception(), sequence, operator_name_));
    throw;
  }
}

}  // namespace shoal::worker
