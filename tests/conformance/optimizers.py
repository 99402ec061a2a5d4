"""torch's optimizer database on the device: every configuration and implementation."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from tests.conformance.compare import DEVICE, check_equal

STEPS = 4


def database() -> list[Any]:
    from torch.testing._internal.common_optimizers import optim_db

    return list(optim_db)


def implementations(info: Any) -> Iterator[tuple[str, dict[str, bool]]]:
    """(name, keyword arguments) of the ways in which one optimizer can compute its step."""
    yield "default", {}
    if "foreach" in info.supported_impls:
        yield "for loop", {"foreach": False}
        yield "foreach", {"foreach": True}
    if "fused" in info.supported_impls and "cpu" in info.supports_fused_on:
        yield "fused", {"fused": True}


def run_check(info: Any, implementation: dict[str, bool]) -> int:
    """Runs all configurations; returns how many, raises Different at the first that differs."""
    count = 0
    for number, config in enumerate(info.optim_inputs_func(device="cpu")):
        kwargs = {**copy.deepcopy(config.kwargs), **implementation}
        what = f"configuration {number} {config.desc}".strip()
        for dtype in _dtypes(info):
            try:
                expected = _train(info, kwargs, "cpu", dtype)
            except Exception:
                continue  # local torch refuses this configuration too
            actual = _train(info, kwargs, DEVICE, dtype)
            check_equal(expected, actual, f"{what} {dtype}")
            count += 1
    return count


def _dtypes(info: Any) -> list[torch.dtype]:
    if info.supports_complex and not info.only_supports_sparse_grads:
        return [torch.float32, torch.complex64]
    return [torch.float32]


def _train(info: Any, kwargs: dict[str, Any], device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Parameters and optimizer state after some steps on made-up gradients."""
    torch.manual_seed(5)
    shapes = [(4, 3), (5, 2)] if info.name == "Muon" else [(4, 3), (5,), (1,)]
    starts = [torch.randn(shape, dtype=dtype) for shape in shapes]
    if info.only_supports_sparse_grads:
        starts = [s.reshape(-1, 1) for s in starts]
    parameters = [torch.nn.Parameter(start.to(device)) for start in starts]
    kwargs = {
        key: value.to(device) if isinstance(value, torch.Tensor) and value.dim() > 0 else value
        for key, value in kwargs.items()
    }
    optimizer = info.optim_cls(parameters, **kwargs)
    for step in range(STEPS):
        torch.manual_seed(100 + step)
        gradients = [torch.randn(start.shape, dtype=dtype) for start in starts]

        def closure(gradients: list[torch.Tensor] = gradients) -> torch.Tensor:
            loss = torch.zeros((), device=device)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                placed = gradient.to(device)
                if info.only_supports_sparse_grads:
                    placed = placed.to_sparse(1)
                parameter.grad = placed
                loss = loss + (parameter * parameter.conj()).real.sum()
            return loss.detach()

        if info.step_requires_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return {
        "parameters": [p.detach() for p in parameters],
        "state": [_tensors(optimizer.state[p]) for p in parameters],
    }


def _tensors(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in sorted(state.items()) if isinstance(v, torch.Tensor)}
