"""Replicas: the model on the devices of each group, with a copy of the user's optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.train.data import batches
from shoal.train.gradients.exchange import Exchange
from shoal.train.group.devices import Reading, allocated_bytes, elapsed_s, record
from shoal.train.group.groups import WorkerGroup
from shoal.train.group.replay import CapturedPass, not_captured
from shoal.train.group.step_events import StepEvents
from shoal.train.group.timeline import Stopwatch, Timeline


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that a group computes at once, and the weight of their mean loss in the whole batch."""

    batch: Any
    weight: float


@dataclass(slots=True)
class StepContext:
    """One replica's view of a step."""

    step: int
    slot: int  # the replica's index in the trainer's list
    micro_batches: Sequence[MicroBatch]
    events: StepEvents
    exchange: Exchange
    scale: float = 1.0  # of the loss, before the backward pass


@dataclass(frozen=True, slots=True)
class Objective:
    """Computes the loss of a batch."""

    loss: batches.Loss | None = None
    autocast: torch.dtype | None = None

    def __call__(self, model: nn.Module, batch: Any, device_type: str) -> torch.Tensor:
        with self.precision(device_type):
            output, target = batches.call(model, batch)
            return batches.loss_of(self.loss, output, target)

    def precision(self, device_type: str) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device_type, dtype=self.autocast)


class Replica:
    """A whole model on a group's first device."""

    def __init__(
        self,
        group: WorkerGroup,
        model: nn.Module,
        optimizer: Optimizer,
        objective: Objective,
        timeline: Timeline,
    ) -> None:
        self.group = group
        self.model = model
        self.optimizer = optimizer
        self.objective = objective
        self.timeline = timeline
        self.fixed_bytes = 0  # in use before the last step's forward passes, and at the end of one
        self.used_bytes = 0
        self._start: torch.Event | None = None  # of the present step
        self._ends: dict[int, tuple[torch.Event, torch.Event]] = {}  # by step: its first, its last
        self.stopwatches = [Stopwatch(str(m), timeline, m.device) for m in self.used_members]
        place(model, optimizer, self.device_of)
        self.parameters = list(model.parameters())
        self.tensors: list[torch.Tensor] = [*self.parameters, *model.buffers()]

    @property
    def used_members(self) -> Sequence[Any]:
        return self.group.members[:1]

    @property
    def stages(self) -> int:
        return 1

    def device_of(self, name: str) -> torch.device:
        """Return the device of a parameter or buffer."""
        device: torch.device = self.group.device
        return device

    def forward_backward(
        self, context: StepContext, captured: CapturedPass | None = None
    ) -> list[tuple[Reading, float]]:
        """Compute the gradients of the weighted losses. Return the losses with their weights."""
        device: torch.device = self.group.device
        losses = []
        start = self._begin()
        for i, micro_batch in enumerate(context.micro_batches):
            context.events.check()
            if i == len(context.micro_batches) - 1:
                context.exchange.arm(context.slot, device)
            with not_captured():
                batch = batches.to_device(micro_batch.batch, device)
            loss = self.objective(self.model, batch, device.type)
            self.used_bytes = max(self.used_bytes, allocated_bytes(device))
            with not_captured():
                if captured is not None:
                    captured.add_forward(batch, loss)
                losses.append((Reading(loss), micro_batch.weight))
            weighted = loss * (micro_batch.weight * context.scale)
            # In this thread: switching to one of autograd's and back costs more than its work.
            with torch.autograd.set_multithreading_enabled(False):
                weighted.backward()  # type: ignore[no-untyped-call]
        with not_captured():
            self.stopwatches[0].time("compute", context.step, start, record(device))
        return losses

    def replay(
        self, leader: Replica, captured: CapturedPass, context: StepContext
    ) -> list[tuple[Reading, float]]:
        """Do the same as `forward_backward` by replaying the leader's pass. Raise `CannotReplay` before
        anything is issued."""
        device: torch.device = self.group.device
        pairs = list(zip(leader.parameters, self.parameters, strict=True))
        grads = [ours.grad for ours, _ in pairs if ours.grad is not None]
        samples = [batches.to_device(m.batch, device) for m in context.micro_batches]
        run = captured.replay(device, leader.tensors, self.tensors, samples, grads)
        start = self._begin()
        losses = []
        for (mark, loss), micro_batch in zip(captured.losses, context.micro_batches, strict=True):
            context.events.check()
            run.until(mark)
            losses.append((Reading(run.tensor(loss)), micro_batch.weight))
        run.until(captured.operators.mark())
        for ours, theirs in pairs:
            theirs.grad = run.tensor(ours.grad) if ours.grad is not None else None
        self.used_bytes = self.fixed_bytes + leader.used_bytes - leader.fixed_bytes
        self.stopwatches[0].time("compute", context.step, start, record(device))
        return losses

    def _begin(self) -> torch.Event:
        with not_captured():
            self._start = record(self.group.device)
        self.fixed_bytes = self.used_bytes = allocated_bytes(self.group.device)
        return self._start

    def evaluate(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch, without gradients."""
        device: torch.device = self.group.device
        with torch.no_grad():
            return self.objective(self.model, batches.to_device(batch, device), device.type)

    def finish(self, step: int) -> None:
        """Note that all work of the step is issued, with its update."""
        if self._start is not None:
            self._ends[step] = self._start, record(self.group.device)
            self._start = None

    def seconds(self, step: int) -> float | None:
        """Return how long the group worked for a step; None until it is known."""
        for old in [s for s in self._ends if s < step]:
            del self._ends[old]
        start, end = self._ends.get(step, (None, None))
        try:
            if start is None or end is None or not end.query():
                return None
            del self._ends[step]
            return elapsed_s(start, end)[1]
        except RuntimeError:  # lost, or an operator failed: whoever reads the result gets it
            return None

    def close(self) -> None:
        for stopwatch in self.stopwatches:
            stopwatch.close()

    def remade(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        """Make this replica again with another model object: the user's, when its own group is lost."""
        self.close()
        return Replica(self.group, model, optimizer, self.objective, self.timeline)


def place(
    model: nn.Module, optimizer: Optimizer | None, device_of: Callable[[str], torch.device]
) -> None:
    """Move parameters, their gradients and optimizer state, and buffers. Parameter objects stay the
    same, so that the optimizer and other holders keep them."""
    for name, parameter in model.named_parameters():
        device = device_of(name)
        before = parameter.device
        if before == device:
            continue
        grad = parameter.grad
        parameter.grad = None
        parameter.data = parameter.data.to(device)
        if grad is not None:
            parameter.grad = grad.to(device)
        if optimizer is not None and parameter in optimizer.state:
            _move_state(optimizer.state[parameter], before, device)
    moved: dict[int, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                name = f"{prefix}.{key}" if prefix else key
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer.to(device_of(name))
                module._buffers[key] = moved[id(buffer)]


def _move_state(state: dict[str, Any], before: torch.device, device: torch.device) -> None:
    """Move state on the parameter's device with it. Step counts that lie on the CPU stay there."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.device == before and value.dim() > 0:
            state[key] = value.to(device)


def clone(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Copy the model, and the optimizer with the copy's parameters."""
    copied = copy.deepcopy(model)
    memo: dict[int, Any] = {}
    originals = list(model.parameters())
    for original, new in zip(originals, copied.parameters(), strict=True):
        memo[id(original)] = new
    known = {id(p) for p in originals}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ValueError(
                    "the optimizer holds a parameter that is not the model's; make it from "
                    "model.parameters()"
                )
    twin = copy.deepcopy(optimizer, memo)
    return copied, twin


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return what learning-rate schedules and users change: everything but the parameters."""
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def adopt_hyperparameters(optimizer: Optimizer, values: Sequence[dict[str, Any]]) -> None:
    for group, value in zip(optimizer.param_groups, values, strict=True):
        group.update(value)


def copy_replica(source: Replica, target: Replica) -> None:
    """Give `target` the weights, buffers and optimizer state of `source`."""
    with torch.no_grad():
        for ours, theirs in zip(source.parameters, target.parameters, strict=True):
            theirs.copy_(ours)
            state = source.optimizer.state.get(ours)
            if state is not None:
                target.optimizer.state[theirs] = {
                    k: beside(v, ours, theirs) for k, v in state.items()
                }
        for ours_b, theirs_b in zip(source.model.buffers(), target.model.buffers(), strict=True):
            theirs_b.copy_(ours_b)
    adopt_hyperparameters(target.optimizer, hyperparameters(source.optimizer))


def beside(value: Any, ours: torch.Tensor, theirs: torch.Tensor) -> Any:
    """Copy a value of `ours`' optimizer state to the device of `theirs`."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if value.device == ours.device and value.device != theirs.device:
        return value.to(theirs.device)
    return value.clone()


def take_over(lost: Replica, survivor: Replica) -> Replica:
    """Give the user's own model and optimizer objects, whose devices are gone, the weights and state
    of a survivor."""
    model, optimizer = lost.model, lost.optimizer
    for ours, theirs in zip(lost.parameters, survivor.parameters, strict=True):
        ours.grad = None
        ours.data = theirs.data
        if theirs in survivor.optimizer.state:
            optimizer.state[ours] = survivor.optimizer.state[theirs]
    modules = zip(model.modules(), survivor.model.modules(), strict=True)
    for our_module, their_module in modules:
        our_module._buffers.update(their_module._buffers)
    return survivor.remade(model, optimizer)
