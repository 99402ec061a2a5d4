"""Cuts a model's forward pass into stages without changing or tracing its code.

The model's own `forward` runs unchanged. Where a stage begins (at a module's call or at `cut("name")`)
it continues on the next device. Every torch function that gets a tensor of an earlier stage gets it on
the current device instead, detached from the autograd graph: an *edge*. The backward pass of a stage
starts from the gradients of the edges that leave it. So skip connections, masks and tied weights need
no annotation. Code that reads a tensor's device, or passes one on (`.to(device)`), gets the current
stage's device.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from shoal.train.group.devices import set_current
from shoal.train.group.errors import CannotCut
from shoal.train.model.weight_gradients import WeightGradients

_local = threading.local()

_DEVICE_OF = torch.Tensor.device.__get__
#: Functions that only query a tensor, which stays where it is.
_QUERIES = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.stride,
    torch.Tensor.numel,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.element_size,
    torch.Tensor.data_ptr,
    torch.Tensor.__len__,
    torch.Tensor.__repr__,
    torch.is_floating_point,
    torch.is_tensor,
    torch.numel,
}


def cut(name: str) -> None:
    """Mark a line of a model's `forward` where a stage may begin. Do nothing outside training.

    >>> def forward(self, x):
    ...     x = self.encode(x)
    ...     shoal.train.cut("decoder")
    ...     return self.decode(x)
    """
    tracer = getattr(_local, "tracer", None)
    if tracer is not None:
        tracer.reached(name, ())


class Tracer(ABC):
    """Learns in which order a forward pass reaches its points."""

    @abstractmethod
    def reached(self, name: str, inputs: Sequence[torch.Tensor]) -> None:
        """Handle the point `name` and the tensors that go into it."""

    def __enter__(self) -> Any:
        _local.tracer = self
        return self

    def __exit__(self, *_: object) -> None:
        _local.tracer = None


def watch_modules(model: nn.Module, names: Sequence[str]) -> list[RemovableHandle]:
    """Call the thread's tracer whenever one of these modules is called."""
    modules = dict(model.named_modules())

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            tracer = getattr(_local, "tracer", None)
            if tracer is not None:
                values = [*args, *kwargs.values()]
                tracer.reached(name, [v for v in values if isinstance(v, torch.Tensor)])

        return hook

    return [
        modules[name].register_forward_pre_hook(hook_of(name), with_kwargs=True)
        for name in names
        if name in modules
    ]


@dataclass(slots=True)
class Edge:
    """A value that goes from one stage to a later one."""

    source: torch.Tensor  # at the stage that computed it
    origin: int
    arrived: torch.Tensor  # the same at the later stage: a leaf there, whose gradient comes back


@dataclass(slots=True)
class Weights:
    """Parameters and buffers of a replica, and copies of those that another stage uses too.

    A weight belongs to the first stage that uses it. A later stage (tied weights, shared cuts)
    computes with a copy that lives for one step; the owner adds the copy's gradient to its own.
    """

    stage_of: dict[int, int]  # id of the tensor -> stage
    copies: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    copied: dict[int, torch.Tensor] = field(default_factory=dict)  # id of the copy -> weight

    def copy_for(self, stage: int, weight: torch.Tensor, device: torch.device) -> torch.Tensor:
        key = (stage, id(weight))
        if key not in self.copies:
            leaf = weight.detach().to(device)
            self.copies[key] = weight, leaf.requires_grad_(weight.requires_grad)
            self.copied[id(leaf)] = weight
        return self.copies[key][1]

    def shared(self, stage: int) -> list[torch.Tensor]:
        """Return the weights of `stage` that have copies, whose gradients are still to be added."""
        weights = [weight for weight, _ in self.copies.values() if weight.requires_grad]
        return [weight for weight in weights if self.stage_of[id(weight)] == stage]

    def add_gradients(self, stage: int) -> None:
        """Add the copies' gradients to the weights that `stage` owns."""
        for (_, identity), (weight, leaf) in sorted(self.copies.items(), key=lambda kv: kv[0][0]):
            if self.stage_of[identity] != stage or leaf.grad is None:
                continue
            grad = leaf.grad.to(weight.device)
            weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
            leaf.grad = None


class Run(Tracer):
    """One micro-batch on its way through the stages."""

    def __init__(
        self,
        begins: dict[str, int],  # name of the point -> stage that begins there
        devices: Sequence[torch.device],
        weights: Weights,
        gradients: WeightGradients | None = None,
        on_stage_done: Callable[[int], None] | None = None,
    ) -> None:
        self.stage = 0
        self.edges: list[list[Edge]] = [[] for _ in devices]  # by the stage they arrive at
        self.loss: torch.Tensor | None = None
        self.gradients = gradients
        self._begins = begins
        self.devices = devices
        self._weights = weights
        self._on_stage_done = on_stage_done
        self._moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._again = False

    @property
    def device(self) -> torch.device:
        return self.devices[self.stage]

    def seen(self, device: torch.device) -> torch.device:
        """Return a tensor's device as the model's code sees it. Hooks of autograd see the real one."""
        return self.device if device in self.devices and not self._again else device

    def forward(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Issue the whole forward pass, stage by stage; the devices run behind."""
        set_current(self.device)
        with self, _Relocate(self):
            loss = compute()
        if self.stage != len(self.devices) - 1:
            missing = [n for n, s in self._begins.items() if s == self.stage + 1]
            raise CannotCut(
                f"this batch's forward pass ended without reaching {missing[0]!r}, where stage "
                f"{self.stage + 1} begins. Call shoal.train.cut() where every forward pass executes it."
            )
        self._moved.clear()
        self._leave()
        self.loss = loss
        return loss

    def backward(
        self, stage: int, values: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
    ) -> None:
        """Issue the stage's backward pass from values that left it. Recomputation (checkpointing) uses
        tensors of other stages as the forward pass does."""
        self.stage, self._again = stage, True
        set_current(self.device)
        with _Relocate(self), torch.autograd.set_multithreading_enabled(False):
            # In this thread: switching to one of autograd's and back costs as much as a small stage.
            # Not torch.autograd.backward: as a torch function it would run without the mode.
            _engine_run_backward(
                tuple(values), tuple(grads), False, False, (),
                allow_unreachable=True, accumulate_grad=True,
            )  # fmt: skip
        self._moved.clear()

    def reached(self, name: str, inputs: Sequence[torch.Tensor]) -> None:
        stage = self._begins.get(name, 0)
        if stage <= self.stage:
            return
        if stage != self.stage + 1:
            raise CannotCut(
                f"the forward pass reached {name!r} before stage {self.stage + 1} began"
            )
        self._leave()
        self.stage = stage
        self._moved.clear()
        set_current(self.device)

    def _leave(self) -> None:
        if self._on_stage_done is not None:
            self._on_stage_done(self.stage)

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` on the current stage's device."""
        found = self._moved.get(id(tensor))
        if found is not None:
            return found[1]
        if id(tensor) in self._weights.stage_of:
            moved = self._weights.copy_for(self.stage, tensor, self.device)
        elif tensor.requires_grad and torch.is_grad_enabled() and not self._again:
            moved = tensor.detach().to(self.device).requires_grad_()
            origin = self.devices.index(tensor.device)
            self.edges[self.stage].append(Edge(tensor, origin, moved))
        else:  # without autograd, or in a graph that begins and ends with this stage
            moved = tensor.to(self.device)
        self._moved[id(tensor)] = (
            tensor,
            moved,
        )  # keeps the source alive, so that its id stays unique
        return moved

    def outgoing(self, stage: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the values that left `stage` and their gradients, summed over the later stages."""
        sources: dict[int, torch.Tensor] = {}
        grads: dict[int, torch.Tensor] = {}
        for later in reversed(range(stage + 1, len(self.devices))):
            for edge in self.edges[later]:
                if edge.origin != stage or edge.arrived.grad is None:
                    continue
                grad = edge.arrived.grad.to(self.devices[stage])
                key = id(edge.source)
                sources[key] = edge.source
                grads[key] = grads[key] + grad if key in grads else grad
        return list(sources.values()), [grads[key] for key in sources]


class _Relocate(TorchFunctionMode):
    """Passes every torch function its tensors on the run's current device."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        run = self._run
        if func in _QUERIES:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__":
            found = func(*args, **kwargs)
            return run.seen(found) if func == _DEVICE_OF else found
        if func is torch.autograd.backward:
            raise CannotCut(
                "a model in stages cannot use reentrant checkpointing, which hides the beginning of a "
                "stage. Use torch.utils.checkpoint.checkpoint(…, use_reentrant=False); for Hugging "
                "Face models: model.gradient_checkpointing_enable({'use_reentrant': False})"
            )
        if run.stage > 0:
            args, kwargs = self._relocated(func, args, kwargs)
        if run.gradients is not None:
            result = run.gradients.call(func, args, kwargs, run.stage)
            if result is not None:
                return result
        return func(*args, **kwargs)

    def _relocated(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        run = self._run
        device = run.device
        if not _any_remote(args, device) and not _any_remote(kwargs.values(), device):
            return args, kwargs
        if args and _is_remote(args[0], device) and _writes_first(func):
            raise CannotCut(
                f"{func.__name__} changes in place a tensor of an earlier stage. Use the version that "
                f"returns a new tensor, or cut the model at another line (now in stage {run.stage})"
            )
        args = tuple(_moved(value, run, device) for value in args)
        return args, {key: _moved(value, run, device) for key, value in kwargs.items()}


def _any_remote(values: Iterable[Any], device: torch.device) -> bool:
    """Return whether a value may have to move. This runs for every torch function, so it is quick."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.get_device() not in (-1, device.index):
                return True
        elif isinstance(value, (list, tuple)):
            if _any_remote(value, device):
                return True
        elif isinstance(value, torch.device) and value != device:
            return True
    return False


def _is_remote(value: Any, device: torch.device) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == device.type
        and value.device != device
    )


def _writes_first(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__setitem__",):
        return True
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


def _moved(value: Any, run: Run, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return run.here(value) if _is_remote(value, device) else value
    if isinstance(value, torch.device):
        return device if value in run.devices else value
    if isinstance(value, (list, tuple)) and any(
        isinstance(v, (torch.Tensor, list, tuple)) for v in value
    ):
        items = [_moved(v, run, device) for v in value]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
