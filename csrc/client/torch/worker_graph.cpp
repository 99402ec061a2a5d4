#include "client/torch/worker_graph.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <atomic>

#include "client/dispatch/dispatch.h"
#include "client/space/devices.h"
#include "client/tensor/tensor.h"

namespace shoal::client {
namespace {

using torch::autograd::variable_list;

std::atomic<uint64_t> g_next_graph{1};

class RecordedBackward final : public torch::autograd::Node {
 public:
  RecordedBackward(uint64_t graph, c10::Device device, const Member& ran,
                   const std::vector<at::Tensor>& leaves, size_t outputs)
      : graph_(graph),
        device_(device),
        session_(ran.session()),
        member_(ran.number()),
        outputs_(outputs) {
    for (const auto& leaf : leaves) {
      OutputMeta meta;
      meta.dtype = leaf.scalar_type();
      meta.sizes.assign(leaf.sizes().begin(), leaf.sizes().end());
      meta.strides.resize(meta.sizes.size());
      int64_t stride = 1;
      for (size_t i = meta.sizes.size(); i-- > 0;) {
        meta.strides[i] = stride;
        stride *= std::max<int64_t>(meta.sizes[i], 1);
      }
      meta.bytes = static_cast<uint64_t>(leaf.numel()) * leaf.itemsize();
      leaves_.push_back(std::move(meta));
    }
  }
  ~RecordedBackward() override { drop(); }
  std::string name() const override { return "ShoalRecordedBackward"; }
  void release_variables() override { drop(); }

  variable_list apply(variable_list&& grads) override {
    TORCH_CHECK(!dropped_,
                "Trying to backward through the graph a second time. Specify "
                "retain_graph=True if you need to backward through the graph a second time.");
    TORCH_CHECK_NOT_IMPLEMENTED(!c10::GradMode::is_enabled(),
                                "a recurrent layer that runs whole on a shoal device has no second "
                                "derivative; set torch.shoal.whole_rnn(False) to run it in steps");
    Session* session = Devices::get().byNumber(session_);
    TORCH_CHECK(session != nullptr, "the lease that ran the forward pass has ended");
    Member* stream = &session->member(member_);
    for (auto& grad : grads) {
      if (grad.defined()) grad = grad.contiguous();
    }
    std::vector<wire::Address> made;
    CallLines::note();
    {
      const Lock held = session->lock();
      std::vector<SegmentUse> uses;
      for (const auto& grad : grads) {
        if (grad.defined() && baseOf(grad) != 0) uses.push_back({baseOf(grad), false});
      }
      uint64_t total = 0;
      for (const auto& leaf : leaves_) total += leaf.bytes;
      session->checkRoom(total, device_.index(), held);
      for (const auto& leaf : leaves_) {
        made.push_back(leaf.bytes == 0 ? 0 : session->mint(leaf.bytes, device_.index(), held));
      }
      session->makeRoom(*stream, uses, total, held);
      for (const SegmentUse& use : uses) session->bring(use.base, *stream, held);
      std::vector<wire::Address> gradients(outputs_, 0);
      for (size_t i = 0; i < std::min(outputs_, grads.size()); ++i) {
        if (grads[i].defined()) gradients[i] = addressOf(grads[i]);
      }
      stream->bringSettings(/*precisions=*/true, held);
      const uint64_t sequence = stream->post(wire::Backward{graph_, gradients, made}, held);
      for (const wire::Address address : made) {
        if (address != 0) session->made(address, *stream, sequence, held);
      }
    }
    variable_list results;
    for (size_t i = 0; i < made.size(); ++i) {
      results.push_back(makeTensor(made[i], leaves_[i], device_));
    }
    return results;
  }

 private:
  void drop() noexcept {
    if (dropped_) return;
    dropped_ = true;
    try {
      Session* session = Devices::get().byNumber(session_);
      if (session == nullptr || !session->member(member_).usable()) return;
      session->member(member_).post(wire::GraphDrop{graph_});
    } catch (...) {
    }
  }

  uint64_t graph_;
  c10::Device device_;
  uint32_t session_, member_;  // where the graph is
  size_t outputs_;
  std::vector<OutputMeta> leaves_;
  bool dropped_ = false;
};

// The tensors that need a gradient, in the order in which the worker meets them.
std::vector<at::Tensor> tensorsWithGradient(c10::ArrayRef<c10::IValue> arguments) {
  std::vector<at::Tensor> found;
  const auto take = [&found](const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().requires_grad() &&
        value.toTensor().device().is_privateuseone()) {
      found.push_back(value.toTensor());
    }
  };
  for (const auto& argument : arguments) {
    take(argument);
    if (argument.isTensorList()) {
      for (const c10::IValue& item : argument.toListRef()) take(item);
    }
  }
  return found;
}

}  // namespace

void dispatchWithGraph(const OperatorInfo& info, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, info.argument_count);
  std::vector<at::Tensor> leaves;
  if (c10::GradMode::is_enabled()) leaves = tensorsWithGradient(arguments);
  if (leaves.empty()) return dispatchCall(info, stack);
  const uint64_t graph = g_next_graph++;
  const c10::Device device = leaves[0].device();
  auto edges = torch::autograd::collect_next_edges(leaves);
  const size_t below = stack->size() - info.argument_count;
  const Member& ran = dispatchWithWorkerGraph(info, stack, graph);
  const size_t outputs = stack->size() - below;
  auto node = c10::make_intrusive<RecordedBackward>(graph, device, ran, leaves, outputs);
  node->set_next_edges(std::move(edges));
  for (size_t i = below; i < stack->size(); ++i) {
    at::Tensor output = (*stack)[i].toTensor();
    torch::autograd::set_history(output, node);
  }
}

}  // namespace shoal::client
