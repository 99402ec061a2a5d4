// Composite operators that are better not decomposed: recurrent layers run whole at the worker, and
// attention picks the worker's fused kernel.
#include "client/composites.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <torch/library.h>

#include <atomic>
#include <memory>

#include "client/dispatch.h"
#include "client/operator_info.h"
#include "client/recorded.h"
#include "client/tensor.h"

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

const char* const kWhole[] = {"lstm.input",     "lstm.data",     "gru.input",      "gru.data",
                              "rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input", "rnn_relu.data"};

// torch's attention asks the device for the best kernel. We ask the worker's torch, once per shape:
// the answer depends on shapes and dtypes only.
bool flashAllowed() { return at::globalContext().userEnabledFlashSDP(); }

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
  const bool on_cpu = streamOf(query).options().is_cpu;
  if (on_cpu && flashAllowed() && query.dim() == 4 && query.layout() == c10::kStrided) {
    constexpr int64_t kFlash = 1;  // sdp::SDPBackend::flash_attention
    const int64_t choice = at::_fused_sdp_choice(query, key, value, bias, dropout, causal, scale,
                                                 grouped);
    if (choice == kFlash) {
      return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout,
                                                                         causal, bias, scale));
    }
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, bias, dropout, causal,
                                                            std::nullopt, scale, grouped));
}

}  // namespace

void setWholeRnn(bool whole) { g_whole_rnn = whole; }
bool wholeRnn() { return g_whole_rnn; }

void registerComposites() {
  for (const auto dispatch_key :
       {c10::DispatchKey::AutogradPrivateUse1, c10::DispatchKey::PrivateUse1}) {
    auto* library =
        new torch::Library(torch::Library::IMPL, "aten", dispatch_key, __FILE__, __LINE__);
    for (const char* name : kWhole) {
      const std::string full(name);
      const auto dot = full.find('.');
      const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
          ("aten::" + full.substr(0, dot)).c_str(), full.substr(dot + 1).c_str());
      library->impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<WholeKernel>(op)));
    }
    library->impl("scaled_dot_product_attention", attention);
  }
}

}  // namespace shoal::client
