"""Profiles a model: its units, their costs and their weights, from one batch on one device."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from shoal.train.group.devices import synchronize
from shoal.train.model.stage_costs import Unit
from shoal.train.model.stages import Tracer, watch_modules

#: A profile repeats its pass at least so often, and more often within so many seconds.
REPEATS, REPEATS_MAX, REPEATS_S = 4, 24, 1.5
SPEED_ROUNDS, SPEED_CALLS = 9, 12
START = "(start)"  # the unit before the first point


@dataclass(frozen=True)
class ModelProfile:
    """The units of a model in the order they run; a stage may begin at each but the first."""

    units: tuple[Unit, ...]
    weights: dict[str, int]  # name of a parameter or buffer -> first unit that uses it
    rows_per_sample: float = 1.0  # mean number of rows that each weight multiplies: tokens, pixels

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward of the profiled micro-batch."""
        return sum(unit.seconds for unit in self.units)

    @property
    def weight_bytes(self) -> int:
        return sum(unit.weight_bytes for unit in self.units)

    @property
    def activation_bytes(self) -> int:
        return sum(unit.activation_bytes for unit in self.units)


def candidates(model: nn.Module) -> list[str]:
    """Return the names of modules at whose call a stage may begin: elements of the model's outermost
    lists of blocks, and the modules beside those lists.

    >>> candidates(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    ['0', '1']
    """
    found: list[str] = []

    def visit(prefix: str, module: nn.Module) -> None:
        in_list = isinstance(module, (nn.Sequential, nn.ModuleList))
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            if isinstance(child, (nn.Sequential, nn.ModuleList)) or (
                not in_list and _holds_list(child)
            ):
                visit(path, child)
            else:
                found.append(path)

    visit("", model)
    return found


def _holds_list(module: nn.Module) -> bool:
    return any(
        isinstance(m, (nn.Sequential, nn.ModuleList)) and len(m) >= 2 for m in module.modules()
    )


class _Recorder(Tracer, TorchFunctionMode):
    """Measures times, weights and bytes by unit in one forward and backward pass."""

    def __init__(
        self, device: torch.device, weights: dict[int, str], weight_storages: set[int]
    ) -> None:
        TorchFunctionMode.__init__(self)
        self._device = device
        self._weights = weights
        self.names: list[str] = [START]
        self.started: list[float] = []
        self.finished_backward: dict[int, float] = {}
        self.crossing: list[int] = [0]
        self.saved: list[int] = [0]
        self.first_use: dict[str, int] = {}
        self.used: set[tuple[str, int]] = set()  # weight and unit
        self._counted = set(weight_storages)

    def __enter__(self) -> Any:
        Tracer.__enter__(self)
        return TorchFunctionMode.__enter__(self)  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        Tracer.__exit__(self)
        TorchFunctionMode.__exit__(self, *error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and id(value) in self._weights:
                name, unit = self._weights[id(value)], len(self.names) - 1
                self.first_use.setdefault(name, unit)
                self.used.add((name, unit))
        return func(*args, **(kwargs or {}))

    def reached(self, name: str, inputs: Sequence[torch.Tensor]) -> None:
        self.stamp()
        self.names.append(name)
        unit = len(self.names) - 1
        carries = [t for t in inputs if t.requires_grad and id(t) not in self._weights]
        self.crossing[-1] = sum(t.numel() * t.element_size() for t in carries)
        self.crossing.append(0)
        self.saved.append(0)
        if carries:

            def done(grad: torch.Tensor) -> None:
                synchronize_any(self._device)
                self.finished_backward[unit] = time.perf_counter()

            carries[0].register_hook(done)  # type: ignore[no-untyped-call]

    def stamp(self) -> None:
        synchronize_any(self._device)
        self.started.append(time.perf_counter())

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count the bytes that autograd keeps: each storage once, weights not at all."""
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in self._counted:
            self._counted.add(pointer)
            self.saved[-1] += tensor.numel() * tensor.element_size()
        return tensor


def synchronize_any(device: torch.device) -> None:
    if device.type != "cpu":
        synchronize(device)


def profile(
    model: nn.Module, forward: Callable[[], torch.Tensor], device: torch.device, samples: int = 1
) -> ModelProfile:
    """Run and measure `forward` (which returns the loss of `samples`) and its backward pass.

    Buffers, gradients and random numbers do not change.
    """
    names = candidates(model)
    handles = watch_modules(model, names)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    weights = {id(t): n for n, t in tensors}
    storages = {t.untyped_storage().data_ptr() for _, t in tensors}
    try:
        with _unchanged(model, device):
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                forward()
            _run(forward, device, weights, storages)  # prepares calls
            runs: list[_Recorder] = []
            until = time.perf_counter() + REPEATS_S
            while len(runs) < REPEATS or (len(runs) < REPEATS_MAX and time.perf_counter() < until):
                runs.append(_run(forward, device, weights, storages))
    finally:
        for handle in handles:
            handle.remove()
    first = runs[0]
    once = [i for i, n in enumerate(first.names) if first.names.count(n) == 1]
    if any(run.names != first.names for run in runs):
        once = [0]  # the order differs from run to run: no cut is safe
    weights_read = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    rows = counter.get_total_flops() / (2 * max(1, weights_read) * samples)
    return _units(model, first, runs, once, max(1.0, rows))


def _run(
    forward: Callable[[], torch.Tensor],
    device: torch.device,
    weights: dict[int, str],
    weight_storages: set[int],
) -> _Recorder:
    recorder = _Recorder(device, weights, weight_storages)
    with torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor):
        with recorder:
            recorder.stamp()
            loss = forward()
            recorder.stamp()
    loss.backward()  # type: ignore[no-untyped-call]
    synchronize_any(device)
    recorder.finished_backward[0] = time.perf_counter()
    return recorder


def _units(
    model: nn.Module,
    first: _Recorder,
    runs: Sequence[_Recorder],
    once: list[int],
    rows_per_sample: float,
) -> ModelProfile:
    """Join what cannot be separated, and take the least time of each unit over the runs."""
    count = len(first.names)
    forward = [min(r.started[i + 1] - r.started[i] for r in runs) for i in range(count)]
    backward = [0.0] * count
    for i, seconds in _backward_seconds(runs, count).items():
        backward[i] = seconds
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    bytes_of = {n: t.numel() * t.element_size() for n, t in tensors.items()}
    starts = [i for i in once if i > 0]
    if _is_empty(first, starts):  # nothing runs before the first module: it starts the model
        starts = starts[1:]
    edges = [0, *starts, count]
    groups = [range(a, b) for a, b in itertools.pairwise(edges)]
    unit_of = {i: u for u, group in enumerate(groups) for i in group}
    weights = {name: unit_of[first.first_use.get(name, 0)] for name in tensors}
    fixed = _fixed_units(model, weights, {(n, unit_of[i]) for n, i in first.used})
    units = []
    for u, group in enumerate(groups):
        begin = group[0]
        if begin == 0 and len(group) > 1 and _is_empty(first, [1]):
            begin = 1
        units.append(
            Unit(
                name=first.names[begin],
                forward_s=sum(forward[i] for i in group),
                backward_s=sum(backward[i] for i in group),
                weight_bytes=sum(b for n, b in bytes_of.items() if weights[n] == u),
                activation_bytes=sum(first.saved[i] for i in group),
                output_bytes=first.crossing[group[-1]],
                shareable=u not in fixed,
            )
        )
    return ModelProfile(tuple(units), weights, rows_per_sample)


def _fixed_units(model: nn.Module, weights: dict[str, int], used: set[tuple[str, int]]) -> set[int]:
    """Return the units that one stage must compute. With a copy of their weights, the owner would miss
    changes of buffers and some gradients."""
    watched = {
        name
        for name, parameter in model.named_parameters()
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    }
    buffers = {name for name, _ in model.named_buffers()}
    tied = {name for name, unit in used if unit != weights[name]}
    fixed = watched | buffers | tied
    return {unit for name, unit in [*used, *weights.items()] if name in fixed}


def _is_empty(recorder: _Recorder, starts: Sequence[int]) -> bool:
    return bool(starts) and starts[0] == 1 and 0 not in recorder.first_use.values()


def _backward_seconds(runs: Sequence[_Recorder], count: int) -> dict[int, float]:
    """Return the backward time by unit, measured when the gradient of a unit's input is there. Units
    without such a gradient divide the time of the one before them by their forward times."""
    best: dict[int, float] = {}
    for run in runs:
        marks = sorted(run.finished_backward)  # units with a mark, in forward order
        ends = [run.finished_backward[m] for m in marks]
        # Backward runs from the last unit to the first; the last mark's start is the loss.
        for k, unit in enumerate(marks):
            later = ends[k + 1] if k + 1 < len(marks) else run.started[-1]
            span = range(unit, marks[k + 1] if k + 1 < len(marks) else count)
            total = sum(run.started[i + 1] - run.started[i] for i in span)
            for i in span:
                fraction = (
                    (run.started[i + 1] - run.started[i]) / total if total > 0 else 1 / len(span)
                )
                seconds = max(0.0, ends[k] - later) * fraction
                best[i] = min(best.get(i, seconds), seconds)
    return best


@contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Any:
    """Restore buffers, gradients and random numbers after the block."""
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    grads = {name: p.grad for name, p in model.named_parameters()}
    indices = [device.index] if device.type != "cpu" else []
    for parameter in model.parameters():
        parameter.grad = None
    with torch.random.fork_rng(indices, device_type=device.type if indices else "cuda"):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
            for name, parameter in model.named_parameters():
                parameter.grad = grads[name]


def measure_speeds(devices: Sequence[torch.device], size: int = 256) -> list[float]:
    """Return the multiplications of a small matrix per second, to compare devices.

    The devices are measured in turn, and the median counts: other load hits each of them equally.
    """
    matrices = [torch.randn(size, size, device=device) for device in devices]
    speeds: list[list[float]] = [[] for _ in devices]
    for _ in range(SPEED_ROUNDS):
        for x, device, seen in zip(matrices, devices, speeds, strict=True):
            synchronize_any(device)
            start = time.perf_counter()
            for _ in range(SPEED_CALLS):
                x @ x
            synchronize_any(device)
            seen.append(SPEED_CALLS / (time.perf_counter() - start))
    return [statistics.median(seen) for seen in speeds]
