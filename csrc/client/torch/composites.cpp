// Composite operators that are better not decomposed: recurrent layers run whole at the worker, and
// attention picks the worker's fused kernel. And what programs expect of any accelerator, though a
// CPU worker has it not.
#include "client/torch/composites.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "client/call/operator_info.h"
#include "client/dispatch/dispatch.h"
#include "client/settings/program_settings.h"
#include "client/tensor/tensor.h"
#include "client/torch/worker_graph.h"

namespace shoal::client {
namespace {

std::atomic<bool> g_whole_rnn{true};

class WholeKernel final : public c10::OperatorKernel {
 public:
  explicit WholeKernel(const c10::OperatorHandle& op) : info_(op) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    if (g_whole_rnn.load(std::memory_order_relaxed)) return dispatchWithGraph(info_, stack);
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
  }

 private:
  const OperatorInfo info_;
};

// histc of integers: accelerators have it, and programs that see a device other than "cpu" use it.
class CountIntegers final : public c10::OperatorKernel {
 public:
  explicit CountIntegers(const c10::OperatorHandle& op) : info_(op) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    at::Tensor input = torch::jit::peek(*stack, 0, 4).toTensor();
    const at::ScalarType type = input.scalar_type();
    const bool on_cpu = sessionOf(input).deviceMember(input.device().index()).options().is_cpu;
    if (!on_cpu || !at::isIntegralType(type, /*includeBool=*/false)) {
      return dispatchCall(info_, stack);
    }
    torch::jit::peek(*stack, 0, 4) = input.to(at::kDouble);
    dispatchCall(info_, stack);
    stack->back() = stack->back().toTensor().to(type);
  }

 private:
  const OperatorInfo info_;
};

const char* const kWhole[] = {"lstm.input",     "lstm.data",     "gru.input",      "gru.data",
                              "rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input", "rnn_relu.data",
                              "lstm_cell",      "gru_cell",      "rnn_tanh_cell",  "rnn_relu_cell"};

// In steps, torch expects every accelerator to have these two kernels. A CPU worker has not;
// written out they run anywhere and can be differentiated twice.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstmCell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cell,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  at::Tensor gates = input_gates + hidden_gates;
  if (input_bias.has_value() && input_bias->defined()) gates = gates + *input_bias;
  if (hidden_bias.has_value() && hidden_bias->defined()) gates = gates + *hidden_bias;
  const auto parts = gates.chunk(4, 1);
  const at::Tensor next = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * next.tanh(), next, at::empty({0}, gates.options())};
}

std::tuple<at::Tensor, at::Tensor> gruCell(const at::Tensor& input_gates,
                                           const at::Tensor& hidden_gates, const at::Tensor& hidden,
                                           const std::optional<at::Tensor>& input_bias,
                                           const std::optional<at::Tensor>& hidden_bias) {
  const auto biased = [](const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
    return bias.has_value() && bias->defined() ? gates + *bias : gates;
  };
  const auto from_input = biased(input_gates, input_bias).chunk(3, 1);
  const auto from_hidden = biased(hidden_gates, hidden_bias).chunk(3, 1);
  const at::Tensor reset = (from_input[0] + from_hidden[0]).sigmoid();
  const at::Tensor update = (from_input[1] + from_hidden[1]).sigmoid();
  const at::Tensor candidate = (from_input[2] + reset * from_hidden[2]).tanh();
  return {candidate + update * (hidden - candidate), at::empty({0}, hidden.options())};
}

// torch's attention asks the device for the best kernel. We ask the worker's torch, and remember
// its answer for all calls that are alike in what it looks at. Sequence lengths and batch sizes are
// not among that (save for being zero, or unlike), so that decoding, where the former grow with
// every token, asks once.
class AttentionChoices {
 public:
  static constexpr int64_t kFlash = 1;  // sdp::SDPBackend::flash_attention

  int64_t choose(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                 const std::optional<at::Tensor>& bias, double dropout, bool causal,
                 std::optional<double> scale, bool grouped) {
    const Features features = describe(query, key, value, bias, dropout, causal, grouped);
    {
      const std::lock_guard lock(mutex_);
      const auto found = known_.find(features);
      if (found != known_.end()) return found->second;
    }
    const int64_t choice =
        at::_fused_sdp_choice(query, key, value, bias, dropout, causal, scale, grouped);
    const std::lock_guard lock(mutex_);
    if (known_.size() > 4096) known_.clear();
    known_.emplace(features, choice);
    return choice;
  }

 private:
  using Features = std::vector<int64_t>;

  static Features describe(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const std::optional<at::Tensor>& bias, double dropout, bool causal,
                           bool grouped) {
    Features features{static_cast<int64_t>(sessionOf(query).number()), dropout > 0, causal, grouped,
                      key.size(2) == value.size(2)};
    const wire::Settings settings = programSettings();  // which kernels may be chosen
    features.push_back(static_cast<int64_t>(settings.flags));
    features.insert(features.end(), settings.attention_order.begin(),
                    settings.attention_order.end());
    for (const at::Tensor* tensor : {&query, &key, &value}) {
      features.insert(features.end(), {static_cast<int64_t>(tensor->scalar_type()),
                                       tensor->size(0) == query.size(0), tensor->size(0) == 0,
                                       tensor->size(1), tensor->size(2) == 0, tensor->size(3),
                                       tensor->stride(3), tensor->requires_grad()});
    }
    if (!bias.has_value() || !bias->defined()) return features;
    features.insert(features.end(), {static_cast<int64_t>(bias->scalar_type()), bias->dim(),
                                     bias->requires_grad()});
    for (const int64_t n : bias->sizes()) {
      features.insert(features.end(), {n == 1, n == query.size(0), n == query.size(1),
                                       n == query.size(2), n == key.size(2)});
    }
    return features;
  }

  std::mutex mutex_;
  std::map<Features, int64_t> known_;
};

bool flashAllowed() {
  return at::globalContext().userEnabledFlashSDP();
}

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, double dropout, bool causal,
                     std::optional<double> scale, bool grouped) {
  std::optional<at::Tensor> bias = mask;
  if (mask.has_value() && mask->defined() && mask->scalar_type() == at::kBool) {
    // As torch does: false means minus infinity.
    at::Tensor added = at::zeros_like(*mask, query.options());
    added.masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity());
    bias = added;
  }
  const bool on_cpu = sessionOf(query).deviceMember(query.device().index()).options().is_cpu;
  // The worker runs below autograd and cannot see that a mask wants a gradient, which flash has
  // not.
  const bool mask_gradient =
      bias.has_value() && bias->defined() && bias->requires_grad() && c10::GradMode::is_enabled();
  if (on_cpu && flashAllowed() && !mask_gradient && query.dim() == 4 && key.dim() == 4 &&
      value.dim() == 4) {
    static AttentionChoices choices;
    const int64_t choice = choices.choose(query, key, value, bias, dropout, causal, scale, grouped);
    if (choice == AttentionChoices::kFlash) {
      return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout,
                                                                         causal, bias, scale));
    }
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, bias, dropout,
                                                            causal, std::nullopt, scale, grouped));
}

}  // namespace

void setWholeRnn(bool whole) {
  g_whole_rnn = whole;
}
bool wholeRnn() {
  return g_whole_rnn;
}

void registerComposites() {
  for (const auto dispatch_key :
       {c10::DispatchKey::AutogradPrivateUse1, c10::DispatchKey::PrivateUse1}) {
    auto* library =
        new torch::Library(torch::Library::IMPL, "aten", dispatch_key, __FILE__, __LINE__);
    for (const char* name : kWhole) {
      const std::string full(name);
      const auto dot = full.find('.');
      const std::string overload = dot == std::string::npos ? "" : full.substr(dot + 1);
      const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
          ("aten::" + full.substr(0, dot)).c_str(), overload.c_str());
      library->impl(name,
                    torch::CppFunction::makeFromBoxedFunctor(std::make_unique<WholeKernel>(op)));
    }
    if (dispatch_key == c10::DispatchKey::PrivateUse1) {
      const auto histc = c10::Dispatcher::singleton().findSchemaOrThrow("aten::histc", "");
      library->impl("histc", torch::CppFunction::makeFromBoxedFunctor(
                                 std::make_unique<CountIntegers>(histc)));
    }
    library->impl("_thnn_fused_lstm_cell", lstmCell);
    library->impl("_thnn_fused_gru_cell", gruCell);
    library->impl("scaled_dot_product_attention", attention);
  }
}

}  // namespace shoal::client
