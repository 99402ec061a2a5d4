"""Deferred gradients of weights, computed apart from those of a layer's inputs.

In a pipeline the previous stage waits for the gradients of inputs, but nothing waits for those of
weights until the step's end. So layers with large weights run through functions whose backward pass
computes the former at once and defers the latter. The multiplication then also sums over micro-batches:
no gradient of a micro-batch is written to memory and read again.

The values are those of autograd, added in the order of the micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

Work = Callable[[], None]
_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)


class WeightGradients:
    """The gradients of weights of one micro-batch, stage by stage.

    Args:
        apart: stages that compute them in `run(stage)`.
        at_once: whether the multiplication sums over micro-batches in other stages too.
        weights: ids of the parameters that may be treated so.
        copied: id of a copy -> the parameter of an earlier stage, which waits for its gradient.
    """

    def __init__(
        self,
        apart: Collection[int],
        at_once: bool,
        weights: Collection[int],
        copied: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self._apart = apart
        self._at_once = at_once
        self._weights = weights
        self._copied: Mapping[int, torch.Tensor] = {} if copied is None else copied
        self._later: dict[int, list[Work]] = {}
        self._copies_later: dict[int, list[Work]] = {}
        self._parameters: dict[int, dict[int, torch.Tensor]] = {}

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], stage: int) -> Any:
        """Return the result of `func`, or None if its gradients cannot be deferred."""
        layer = _LAYERS.get(func)
        if layer is None or kwargs:
            return None
        if stage not in self._apart and (not self._at_once or func in _CONVOLUTIONS):
            return None
        parameters = _parameters(func, args)
        if not torch.is_grad_enabled() or not all(self._may(p) for p in parameters):
            return None
        copies = any(id(p) in self._copied for p in parameters)
        deferred = self._copies_later if copies else self._later
        later = deferred.setdefault(stage, []) if stage in self._apart else None
        result = layer(args, later)
        if result is not None and later is not None:
            own = ((id(p), p) for p in parameters if id(p) not in self._copied)
            self._parameters.setdefault(stage, {}).update(own)
        return result

    def _may(self, parameter: Any) -> bool:
        """Return whether to defer: not if it is frozen, not a parameter, or has a hook."""
        owner = self._copied.get(id(parameter), parameter)
        return id(owner) in self._weights and owner.requires_grad and not owner._backward_hooks

    def waiting(self, stage: int) -> list[torch.Tensor]:
        """Return the parameters whose gradients are incomplete before `run(stage)`."""
        return list(self._parameters.get(stage, {}).values())

    def run(self, stage: int) -> None:
        """Compute the stage's deferred gradients."""
        self.run_copies(stage)
        _run(self._later.pop(stage, []))
        self._parameters.pop(stage, None)

    def run_copies(self, stage: int) -> None:
        """Compute the stage's deferred gradients of weights that an earlier stage owns."""
        _run(self._copies_later.pop(stage, []))


def _run(works: list[Work]) -> None:
    with torch.no_grad():
        for work in works:
            work()
    works.clear()  # the autograd graph may hold the list, and live on


def _parameters(func: Any, args: Sequence[Any]) -> list[Any]:
    """Return the parameters whose gradients a layer can defer."""
    if func is torch.addmm:
        return list(args[2:3])
    convolves = func in _CONVOLUTIONS and len(args) > 2 and args[2] is not None
    return list(args[1:3] if convolves else args[1:2])


def _put(later: list[Work] | None, work: Work) -> None:
    if later is None:
        work()
    else:
        later.append(work)


def _accumulate(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    gradient = gradient.to(weight.dtype)
    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


def _accumulate_product(weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if weight.grad is None or weight.dtype != left.dtype:
        _accumulate(weight, left.mm(right))
    else:
        weight.grad.addmm_(left, right)


class _Product(torch.autograd.Function):
    """x · weightᵀ + bias, or x · weight + bias, with any number of rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
        later: list[Work] | None,
    ) -> torch.Tensor:
        # The parameter itself, whose gradient is set: a saved tensor may come back as another object.
        ctx.save_for_backward(x)
        ctx.weight, ctx.transposed, ctx.later = weight, transposed, later
        if transposed:
            return F.linear(x, weight, bias)
        assert bias is not None
        return torch.addmm(bias, x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors  # checkpointing may recompute it now
        with torch._C.DisableTorchFunction():
            return _Product._gradients(ctx, grad, x)

    @staticmethod
    def _gradients(ctx: Any, grad: torch.Tensor, x: torch.Tensor) -> Any:
        weight = ctx.weight
        to_x = to_bias = None
        if ctx.needs_input_grad[0]:
            factor = weight.to(grad.dtype)
            to_x = grad.matmul(factor if ctx.transposed else factor.t()).to(x.dtype)
        rows = grad.reshape(-1, grad.shape[-1])
        inputs = x.to(grad.dtype).reshape(-1, x.shape[-1])
        left, right = (rows.t(), inputs) if ctx.transposed else (inputs.t(), rows)
        _put(ctx.later, partial(_accumulate_product, weight, left, right))
        if ctx.needs_input_grad[2]:
            to_bias = rows.sum(0)
        return to_x, None, to_bias, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        func: Callable[..., torch.Tensor],
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
        later: list[Work] | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias = weight, bias
        ctx.geometry = stride, padding, dilation, False, [0] * len(stride), groups
        ctx.later = later
        return func(x, weight, bias, stride, padding, dilation, groups)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch._C.DisableTorchFunction():
            return _Convolution._gradients(ctx, grad, x)

    @staticmethod
    def _gradients(ctx: Any, grad: torch.Tensor, x: torch.Tensor) -> Any:
        weight, bias = ctx.weight, ctx.bias
        inputs, factor = x.to(grad.dtype), weight.to(grad.dtype)
        sizes = None if bias is None else list(bias.shape)
        back = partial(
            torch.ops.aten.convolution_backward, grad, inputs, factor, sizes, *ctx.geometry
        )
        to_x = back([True, False, False])[0].to(x.dtype) if ctx.needs_input_grad[0] else None

        def deferred() -> None:
            to_weight, to_bias = back([False, True, bias is not None])[1:]
            _accumulate(weight, to_weight)
            if bias is not None:
                _accumulate(bias, to_bias)

        _put(ctx.later, deferred)
        return to_x, *(None,) * 8


def _linear(args: Sequence[Any], later: list[Work] | None) -> Any:
    x, weight, bias = args if len(args) == 3 else (*args, None)
    return _Product.apply(x, weight, bias, True, later)  # type: ignore[no-untyped-call]


def _addmm(args: Sequence[Any], later: list[Work] | None) -> Any:
    bias, x, weight = args
    return _Product.apply(x, weight, bias, False, later)  # type: ignore[no-untyped-call]


def _convolution(func: Any, args: Sequence[Any], later: list[Work] | None) -> Any:
    defaults = (None, 1, 0, 1, 1)
    x, weight = args[:2]
    rest: tuple[Any, ...] = (*args[2:], *defaults[len(args) - 2 :])
    bias, stride, padding, dilation, groups = rest
    sides = weight.dim() - 2
    if isinstance(padding, str) or x.dim() != weight.dim():
        return None
    each = [[v] * sides if isinstance(v, int) else list(v) for v in (stride, padding, dilation)]
    made = x, weight, bias, func, *each, groups, later
    return _Convolution.apply(*made)  # type: ignore[no-untyped-call]


_LAYERS: dict[Any, Callable[[Sequence[Any], list[Work] | None], Any]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    **{func: partial(_convolution, func) for func in _CONVOLUTIONS},
}
