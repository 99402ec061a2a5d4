// Operators that torch has for CUDA only, as CPU kernels: the fallback then runs them as any other.
#include <torch/library.h>

#include "backend.h"

namespace standin {
namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

bool has(const Maybe& tensor) {
  return tensor.has_value() && tensor->defined();
}

Tensor plus(const Tensor& gates, const Maybe& bias) {
  return has(bias) ? gates + *bias : gates;
}

// Workspace: the four gates after their functions, as CUDA keeps them.
std::tuple<Tensor, Tensor, Tensor> lstmCell(const Tensor& input, const Tensor& hidden,
                                            const Tensor& cx, const Maybe& input_bias,
                                            const Maybe& hidden_bias) {
  const auto gates = (plus(input, input_bias) + plus(hidden, hidden_bias)).chunk(4, 1);
  const Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid();
  const Tensor cell = gates[2].tanh(), out = gates[3].sigmoid();
  const Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstmCellBackward(const Maybe& grad_hy, const Maybe& grad_cy,
                                                    const Tensor& cx, const Tensor& cy,
                                                    const Tensor& workspace, bool has_bias) {
  if (!has(grad_hy) && !has(grad_cy)) return {};
  const auto gates = workspace.chunk(4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const Tensor tanh_cy = cy.tanh();
  Tensor grad_cell_state = has(grad_cy) ? *grad_cy : at::zeros_like(cx);
  Tensor grad_out = at::zeros_like(cx);
  if (has(grad_hy)) {
    grad_out = *grad_hy * tanh_cy * out * (1 - out);
    grad_cell_state = grad_cell_state + *grad_hy * out * (1 - tanh_cy * tanh_cy);
  }
  const Tensor grad_in = grad_cell_state * cell * in * (1 - in);
  const Tensor grad_forget = grad_cell_state * cx * forget * (1 - forget);
  const Tensor grad_cell = grad_cell_state * in * (1 - cell * cell);
  const Tensor grad_gates = at::cat({grad_in, grad_forget, grad_cell, grad_out}, 1);
  return {grad_gates, grad_cell_state * forget, has_bias ? grad_gates.sum(0) : Tensor()};
}

// Workspace: reset and update gate, new state, old state, and the hidden part of the new state.
std::tuple<Tensor, Tensor> gruCell(const Tensor& input, const Tensor& hidden, const Tensor& hx,
                                   const Maybe& input_bias, const Maybe& hidden_bias) {
  const auto from_input = plus(input, input_bias).chunk(3, 1);
  const auto from_hidden = plus(hidden, hidden_bias).chunk(3, 1);
  const Tensor reset = (from_input[0] + from_hidden[0]).sigmoid();
  const Tensor update = (from_input[1] + from_hidden[1]).sigmoid();
  const Tensor fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, from_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gruCellBackward(const Tensor& grad_hy,
                                                                   const Tensor& workspace,
                                                                   bool has_bias) {
  const auto kept = workspace.chunk(5, 1);
  const Tensor &reset = kept[0], &update = kept[1], &fresh = kept[2], &hx = kept[3];
  const Tensor grad_update = grad_hy * (hx - fresh) * update * (1 - update);
  const Tensor grad_fresh = grad_hy * (1 - update) * (1 - fresh * fresh);
  const Tensor grad_reset = grad_fresh * kept[4] * reset * (1 - reset);
  const Tensor grad_input = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  const Tensor grad_hidden = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  return {grad_input, grad_hidden, grad_hy * update, has_bias ? grad_input.sum(0) : Tensor(),
          has_bias ? grad_hidden.sum(0) : Tensor()};
}

// CUDA chooses a fused kernel of attention by rules of its own; the stand-in has none.
int64_t chooseMath(const Tensor&, const Tensor&, const Tensor&, const Maybe&, double, bool,
                   std::optional<double>, bool) {
  return 0;
}

// The CPU counts floating-point numbers only.
Tensor countInBins(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  if (!at::isIntegralType(self.scalar_type(), true)) {
    Tensor counts = at::empty({bins}, self.options());
    return at::histc_out(counts, self, bins, min, max);
  }
  return self.to(at::kDouble).histc(bins, min, max).to(self.scalar_type());
}

}  // namespace
}  // namespace standin

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_thnn_fused_lstm_cell", standin::lstmCell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", standin::lstmCellBackward);
  m.impl("_thnn_fused_gru_cell", standin::gruCell);
  m.impl("_thnn_fused_gru_cell_backward", standin::gruCellBackward);
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_fused_sdp_choice", standin::chooseMath);
  m.impl("histc", standin::countInBins);
}
