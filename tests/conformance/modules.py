"""torch's module database on the device: forward, buffers and gradients, train and eval."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from tests.conformance.compare import DEVICE, Different, check_equal, to_shoal


def database() -> list[Any]:
    from torch.testing._internal.common_modules import module_db

    return list(module_db)


def modes(info: Any) -> Iterator[tuple[str, bool]]:
    """(name, training) of everything that is checked for one module."""
    yield "train", True
    if info.train_and_eval_differ:
        yield "eval", False


def run_check(info: Any, training: bool) -> int:
    """Runs all inputs of one module; returns how many. Raises Different at the first that is."""
    for dtype in (torch.float32, torch.float64):  # a few inputs of the database are double only
        torch.manual_seed(3)
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=dtype, requires_grad=True, training=training
        )
        count = 0
        for number, module_input in enumerate(inputs):
            if module_input.forward_input is not None:
                what = f"input {number} {module_input.desc}".strip()
                count += _one_input(info.module_cls, module_input, training, what)
        if count > 0:
            return count
    raise Different("the database has no input that local torch accepts")


def _one_input(module_class: Any, module_input: Any, training: bool, what: str) -> int:
    constructor, forward = module_input.constructor_input, module_input.forward_input
    torch.manual_seed(5)
    module = module_class(*constructor.args, **constructor.kwargs).train(training)
    args, kwargs = _fresh(forward.args), _fresh(forward.kwargs)
    if _is_lazy(module):
        module(*_fresh(forward.args), **_fresh(forward.kwargs))
    twin = copy.deepcopy(module).to(DEVICE)
    for name, value in vars(twin).items():  # tensors that the module does not know as its own
        if isinstance(value, torch.Tensor):
            setattr(twin, name, to_shoal(value))
    twin_args, twin_kwargs = to_shoal(args), to_shoal(kwargs)
    try:
        expected = _outcome(module, args, kwargs)
    except Exception:
        return 0  # local torch refuses this input too
    check_equal(expected, _outcome(twin, twin_args, twin_kwargs), what)
    return 1


def _is_lazy(module: Any) -> bool:
    return isinstance(module, torch.nn.modules.lazy.LazyModuleMixin)


def _fresh(value: Any) -> Any:
    """A copy whose tensors are leaves again: an input may be used once per device."""
    from torch.utils._pytree import tree_map

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return tree_map(copied, value)


def _outcome(module: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Everything that a caller can see of one step: output, buffers, gradients."""
    torch.manual_seed(7)
    output = module(*args, **kwargs)
    outputs = [
        t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    leaves = [
        t
        for t in tree_flatten((args, kwargs))[0]
        if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf
    ]
    leaves += [p for p in module.parameters() if p.requires_grad]
    gradients: tuple[Any, ...] = ()
    if outputs and leaves:
        torch.manual_seed(11)
        seeds = [torch.randn(t.shape, dtype=t.dtype).to(t.device) for t in outputs]
        gradients = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)
    return {
        "output": output,
        "buffers": dict(module.named_buffers()),
        "gradients": list(gradients),
    }
