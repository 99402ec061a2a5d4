"""torch's operator database on the device: forward in several dtypes, gradients in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from tests.conformance.compare import both, check_equal, to_shoal

DTYPES = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64]

#: Results hold whatever was in memory: only their shape can be compared.
UNINITIALISED = {
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
    "resize_", "resize_as_",
}  # fmt: skip

#: torch wants these arguments on the CPU, whatever the device of the others.
HOST_ARGUMENTS = {"tensor_split"}


def database() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def key(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def checks(op: Any) -> Iterator[tuple[str, Any, bool]]:
    """(name, dtype, with gradients) of everything that is checked for one operator."""
    for dtype in DTYPES:
        if dtype in op.supported_dtypes("cpu"):
            yield f"{key(op)} {str(dtype).removeprefix('torch.')}", dtype, False
    if torch.float32 in op.supported_backward_dtypes("cpu") and op.supports_autograd:
        yield f"{key(op)} gradient", torch.float32, True


def run_check(op: Any, dtype: torch.dtype, gradient: bool) -> int:
    """Runs all samples of one check; returns how many. Raises Different at the first that is."""
    count = 0
    for number, sample in enumerate(_samples(op, dtype, gradient)):
        args = (sample.input, *sample.args)
        what = f"sample {number}"
        if gradient:
            count += _gradient(op, sample, what)
        else:
            count += _forward(op, args, sample.kwargs, what)
    return count


def _samples(op: Any, dtype: torch.dtype, gradient: bool) -> Iterator[Any]:
    torch.manual_seed(3)
    yield from op.sample_inputs("cpu", dtype, requires_grad=gradient)


def _forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], what: str) -> int:
    try:
        torch.manual_seed(7)
        op(*_copies(args), **_copies(kwargs))
    except Exception:
        return 0  # local torch refuses this sample too
    moved = _moved(op, args, kwargs)
    expected, actual = both(op, (args, kwargs), moved)
    check_equal(expected, actual, what, values=op.name not in UNINITIALISED)
    return 1


def _moved(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if op.name in HOST_ARGUMENTS:
        return (to_shoal(args[0]), *args[1:]), kwargs
    return to_shoal(args), to_shoal(kwargs)


def _copies(value: Any) -> Any:
    from torch.utils._pytree import tree_map

    return tree_map(lambda v: v.detach().clone() if isinstance(v, torch.Tensor) else v, value)


def _leaves(value: Any) -> list[torch.Tensor]:
    found = [v for v in tree_flatten(value)[0] if isinstance(v, torch.Tensor) and v.requires_grad]
    return [v for v in found if v.is_leaf]


def _gradient(op: Any, sample: Any, what: str) -> int:
    args, kwargs = (sample.input, *sample.args), sample.kwargs
    moved = _moved(op, args, kwargs)
    process = sample.output_process_fn_grad  # keeps what of the result has a defined gradient
    try:
        torch.manual_seed(7)
        result = process(op(*args, **kwargs))
    except Exception:
        return 0  # local torch refuses this sample too
    if not _differentiable(result) or not _leaves((args, kwargs)):
        return 0
    try:
        expected = _gradients(result, args, kwargs)
    except (RuntimeError, NotImplementedError):
        return 0  # local torch has no derivative here
    torch.manual_seed(7)
    result = process(op(*moved[0], **moved[1]))
    check_equal(expected, _gradients(result, *moved), what)
    return 1


def _differentiable(result: Any) -> list[torch.Tensor]:
    return [
        t
        for t in tree_flatten(result)[0]
        if isinstance(t, torch.Tensor)
        and t.requires_grad
        and (t.is_floating_point() or t.is_complex())
    ]


def _gradients(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    outputs = _differentiable(result)
    torch.manual_seed(11)
    seeds = [torch.randn(t.shape, dtype=t.dtype).to(t.device) for t in outputs]
    return list(torch.autograd.grad(outputs, _leaves((args, kwargs)), seeds, allow_unused=True))
