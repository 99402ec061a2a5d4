"""Comparing what the device computes with local torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Same dtype, shape and bytes."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    left, right = (t.detach().cpu().contiguous().reshape(-1) for t in (actual, expected))
    assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def close(actual: Any, expected: Any, **tolerances: float) -> None:
    """Same structure, dtypes and shapes, values within torch's default tolerances."""
    left, right = tree_flatten(actual)[0], tree_flatten(expected)[0]
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(
                a.detach().cpu(), b.detach().cpu(), equal_nan=True, check_stride=False, **tolerances
            )
        else:
            assert a == b


def on_both(function: Callable[..., Any], *tensors: torch.Tensor, seed: int = 7) -> tuple[Any, Any]:
    """The function's results on the device and on the CPU, from the same seed."""
    torch.manual_seed(seed)
    expected = function(*[t.clone() for t in tensors])
    torch.manual_seed(seed)
    actual = function(*[t.to("shoal") for t in tensors])
    return actual, expected


def agree(function: Callable[..., Any], *tensors: torch.Tensor, seed: int = 7) -> None:
    """Checks that the function does the same on the device as on the CPU, on the device."""
    actual, expected = on_both(function, *tensors, seed=seed)
    for leaf in tree_flatten(actual)[0]:
        if isinstance(leaf, torch.Tensor):
            assert leaf.device.type == "shoal"
    close(actual, expected)


def to_cpu(value: Any) -> Any:
    return tree_map(lambda v: v.cpu() if isinstance(v, torch.Tensor) else v, value)
