"""Gradients: first and second, hooks, checkpointing, torch.func, autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.compare import agree, close, same_bits

torch.manual_seed(0)
X = torch.randn(5, 4)
W = torch.randn(4, 3)


def test_backward_of_a_small_network() -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        x.requires_grad_()
        w.requires_grad_()
        loss = torch.tanh(x @ w).pow(2).mean()
        loss.backward()
        assert x.grad is not None
        assert w.grad is not None
        return [loss, x.grad, w.grad]

    agree(run, X, W)


def test_gradients_accumulate_and_can_be_cleared() -> None:
    w = W.to("shoal").requires_grad_()
    for _ in range(3):
        (w * 2).sum().backward()
    same_bits(w.grad, torch.full((4, 3), 6.0))
    w.grad.zero_()
    (w * 2).sum().backward()
    same_bits(w.grad, torch.full((4, 3), 2.0))


def test_double_backward() -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        x.requires_grad_()
        w.requires_grad_()
        out = torch.sigmoid(x @ w).sum()
        (first,) = torch.autograd.grad(out, x, create_graph=True)
        penalty = (first.norm() - 1) ** 2
        return [first, *torch.autograd.grad(penalty, [x, w])]

    agree(run, X, W)


def test_third_derivative() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        y = (x**5).sum()
        for _ in range(3):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y

    agree(run, X)


def test_gradcheck() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, device="shoal", requires_grad=True)
    w = torch.randn(4, 2, dtype=torch.float64, device="shoal", requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: torch.softmax(x @ w, 1), (x, w))
    assert torch.autograd.gradgradcheck(lambda x: torch.tanh(x).sum(0), (x,))


def test_hooks_of_tensors_and_modules() -> None:
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        torch.manual_seed(1)
        layer = nn.Linear(4, 3).to(x.device)
        layer.register_forward_hook(lambda m, i, o: o * 2)
        layer.register_full_backward_hook(lambda m, gi, go: seen.extend([*gi, *go]))
        x.requires_grad_()
        x.register_hook(lambda g: g * 3)
        layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        layer(x).sum().backward()
        return [x.grad, *seen]

    agree(run, X)


def test_saved_tensor_hooks_move_activations_to_the_host_and_back() -> None:
    x = X.to("shoal").requires_grad_()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = (x.exp() * x).sum()
    y.backward()
    local = X.clone().requires_grad_()
    (local.exp() * local).sum().backward()
    close(x.grad, local.grad)


def test_in_place_after_saving_is_detected() -> None:
    x = X.to("shoal").requires_grad_()
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_custom_function() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return grads[0] * 3 * x**2

    def run(x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        Cube.apply(x).sum().backward()
        return x.grad

    agree(run, X)


@pytest.mark.filterwarnings("ignore")
def test_anomaly_mode_names_the_operator() -> None:
    x = torch.zeros(2, device="shoal", requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        with pytest.raises(RuntimeError, match="nan values"):
            (x / x).sqrt().sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_recomputes_with_the_same_random_numbers(reentrant: bool) -> None:
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(1)
        block = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 4))
        block.to(x.device)
        x.requires_grad_()
        torch.manual_seed(2)
        y = checkpoint(block, x, use_reentrant=reentrant)
        torch.rand(
            7, device=x.device
        )  # moves the generator on: the recomputation must move it back
        y.sum().backward()
        return [y, x.grad, *[p.grad for p in block.parameters()]]

    agree(run, X)


def test_no_grad_and_inference_mode() -> None:
    x = X.to("shoal").requires_grad_()
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.inference_mode():
        y = x * 2
        y.add_(1)
    close(y, X * 2 + 1)
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        (y * x).sum().backward()


# --- torch.func --------------------------------


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w).pow(2).sum()


def test_func_grad_and_vmap() -> None:
    agree(lambda x, w: torch.func.grad(loss)(w, x), X, W)
    agree(lambda x, w: torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x), X, W)
    agree(lambda x: torch.vmap(lambda row: row.softmax(0).cumsum(0))(x), X)


def test_func_jacobians() -> None:
    agree(lambda x, w: torch.func.jacrev(lambda w: torch.sin(x @ w))(w), X, W)
    agree(lambda x, w: torch.func.jacfwd(lambda w: torch.sin(x @ w))(w), X, W)
    agree(lambda x, w: torch.func.hessian(loss)(w, x), X, W)
    agree(lambda x: torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),)), X)
    agree(lambda x: torch.func.vjp(torch.exp, x)[1](torch.ones_like(x)), X)


def test_functional_call_and_ensembles() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        models = [nn.Linear(4, 2).to(x.device) for _ in range(3)]
        params, buffers = torch.func.stack_module_state(models)
        base = models[0]

        def call(p: Any, b: Any) -> torch.Tensor:
            return torch.func.functional_call(base, (p, b), (x,))

        return torch.vmap(call)(params, buffers)

    agree(run, X)


# --- autocast --------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_the_low_precision(dtype: torch.dtype) -> None:
    layer = nn.Linear(4, 3).to("shoal")
    with torch.autocast("shoal", dtype=dtype):
        low = layer(X.to("shoal"))
        assert torch.is_autocast_enabled("shoal")
        kept = low.float().softmax(1)
    assert low.dtype == dtype
    assert kept.dtype == torch.float32
    close(low.float(), layer(X.to("shoal")), rtol=0.05, atol=0.05)
    low.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert layer(X.to("shoal")).dtype == torch.float32


def test_autocast_keeps_losses_in_full_precision() -> None:
    with torch.autocast("shoal", dtype=torch.bfloat16):
        logits = (X.to("shoal") @ W.to("shoal")).requires_grad_()
        value = nn.functional.cross_entropy(
            logits, torch.zeros(5, dtype=torch.long, device="shoal")
        )
    assert value.dtype == torch.float32


def test_a_training_step_under_autocast_and_a_gradient_scaler() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to("shoal")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("shoal", init_scale=256.0)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("shoal", dtype=torch.float16):
            value = model(X.to("shoal")).float().pow(2).mean()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(value.item())
    assert losses[-1] < losses[0]
