"""Runs one thing on the CPU and on the shoal device and says where the two differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = "shoal"


class Different(AssertionError):
    """The two devices disagree; the text says how."""


def move_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the device with the same strides and offset, in a storage of the same size."""
    plain = tensor.detach()
    if plain.layout != torch.strided or plain.is_conj() or plain.is_neg() or plain.numel() == 0:
        return plain.to(DEVICE).requires_grad_(tensor.requires_grad)
    whole = torch.empty(0, dtype=plain.dtype).set_(plain.untyped_storage())
    view = whole.to(DEVICE).as_strided(plain.size(), plain.stride(), plain.storage_offset())
    return view.requires_grad_(tensor.requires_grad)


def to_shoal(value: Any) -> Any:
    """The same arguments with tensors on the device (views of one storage become copies)."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return move_tensor(leaf)
        if isinstance(leaf, torch.device) or leaf == "cpu":
            return DEVICE
        if isinstance(leaf, torch.Generator):
            return torch.Generator(DEVICE).manual_seed(leaf.initial_seed())
        return leaf

    return tree_map(move, value)


def check_equal(expected: Any, actual: Any, what: str, values: bool = True) -> None:
    """Raises Different unless both are alike: structure, dtype, shape and (close) values."""
    left, left_spec = tree_flatten(expected)
    right, right_spec = tree_flatten(actual)
    if left_spec != right_spec:
        raise Different(f"{what}: structure {left_spec} became {right_spec}")
    for a, b in zip(left, right, strict=True):
        if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
            raise Different(f"{what}: {type(a).__name__} became {type(b).__name__}")
        if isinstance(a, torch.Tensor):
            _check_tensor(a, b, what, values)
        elif values and a != b and not (a != a and b != b) and not isinstance(a, torch.device):
            raise Different(f"{what}: {a!r} became {b!r}")


def _check_tensor(a: torch.Tensor, b: torch.Tensor, what: str, values: bool) -> None:
    if a.device.type == "cpu" and b.device.type not in (DEVICE, "cpu"):
        raise Different(f"{what}: result is on {b.device}")
    if a.dtype != b.dtype or a.shape != b.shape:
        raise Different(f"{what}: {a.dtype} {list(a.shape)} became {b.dtype} {list(b.shape)}")
    if a.layout != b.layout:
        raise Different(f"{what}: {a.layout} became {b.layout}")
    if not values or a.layout != torch.strided:
        b.to_dense().cpu() if b.layout != torch.strided else b.cpu()
        return
    a, b = a.detach().resolve_conj().resolve_neg(), b.detach().cpu().resolve_conj().resolve_neg()
    try:
        torch.testing.assert_close(b, a, equal_nan=True, check_stride=False)
    except AssertionError as error:
        raise Different(f"{what}: {str(error).splitlines()[0]}") from None


def both(function: Callable[..., Any], on_cpu: Any, on_shoal: Any) -> tuple[Any, Any]:
    """Results of the call with either (args, kwargs), each from the same seed."""
    torch.manual_seed(7)
    expected = function(*on_cpu[0], **on_cpu[1])
    torch.manual_seed(7)
    return expected, function(*on_shoal[0], **on_shoal[1])
