"""A model in stages over the devices of one group, with micro-batches in a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.train.data import batches
from shoal.train.group.devices import Reading, record, set_current
from shoal.train.group.groups import WorkerGroup
from shoal.train.group.replay import CapturedPass
from shoal.train.group.timeline import Timeline
from shoal.train.model import schedules
from shoal.train.model.profile import ModelProfile
from shoal.train.model.replicas import Objective, Replica, StepContext
from shoal.train.model.stage_costs import Limits, Stage, spread
from shoal.train.model.stages import Run, Weights, watch_modules
from shoal.train.model.weight_gradients import WeightGradients

#: Steps whose every forward and backward is timed; of the others only the whole is.
DETAIL_EVERY, DETAIL_STEPS = 16, 2


@dataclass(frozen=True)
class StagePlan:
    """The cuts of a model for one group."""

    stages: tuple[Stage, ...]
    names: tuple[str, ...]  # of the points where units begin
    stage_of: dict[str, int]  # parameter or buffer -> stage
    schedule: str
    micro_batches: int  # of a step, as planned

    @staticmethod
    def of(profile: ModelProfile, stages: Sequence[Stage], limits: Limits) -> StagePlan:
        names = tuple(unit.name for unit in profile.units)
        stage_of_unit = {u: i for i, s in enumerate(stages) for u in range(s.start, s.stop)}
        owner = {name: stage_of_unit[unit] for name, unit in profile.weights.items()}
        return StagePlan(tuple(stages), names, owner, limits.schedule, limits.micro_batches)

    @property
    def points(self) -> list[str]:
        """Return all points where a stage begins."""
        cuts = [stage.cut for stage in self.stages[1:]]
        return [self.names[unit] for cut in cuts for unit in sorted({cut.early, cut.at})]

    def begins(self, micro: int = 0, micro_batches: int = 1) -> dict[str, int]:
        """Map each point to the stage that begins there, for one micro-batch of a step. A single
        micro-batch is computed where its weights are."""
        found = {}
        for index, stage in enumerate(self.stages[1:], start=1):
            fraction = stage.shared_micros / self.micro_batches
            # Not all: that would be another cut, which copies weights for nothing.
            count = min(round(fraction * micro_batches), micro_batches - 1)
            early = micro in spread(count, micro_batches)
            found[self.names[stage.cut.early if early else stage.start]] = index
        return found


class PipelineReplica(Replica):
    """A model in stages, one on each device of its group."""

    def __init__(
        self,
        group: WorkerGroup,
        model: nn.Module,
        optimizer: Optimizer,
        objective: Objective,
        timeline: Timeline,
        plan: StagePlan,
    ) -> None:
        self.plan = plan
        self._members = [group.members[stage.device] for stage in plan.stages]
        self.devices = [member.device for member in self._members]
        super().__init__(group, model, optimizer, objective, timeline)
        # Kept alive, so that their ids stay unique.
        self._tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        self._stage_of = {id(t): self.plan.stage_of.get(n, 0) for n, t in self._tensors}
        self._hooks = watch_modules(model, plan.points)
        self.unwatched = frozenset(  # no hook waits for their gradients
            id(p) for p in model.parameters() if not p._post_accumulate_grad_hooks
        )

    @property
    def used_members(self) -> Sequence[Any]:
        return self._members

    @property
    def stages(self) -> int:
        return len(self.plan.stages)

    def device_of(self, name: str) -> torch.device:
        # A tied weight may carry any of its names; the profile knows the first.
        device: torch.device = self.devices[self.plan.stage_of.get(name, 0)]
        return device

    def _weights(self) -> Weights:
        return Weights(self._stage_of)

    def forward_backward(
        self, context: StepContext, captured: CapturedPass | None = None
    ) -> list[tuple[Reading, float]]:
        return _PipelineStep(self, self._weights(), context).run()

    def evaluate(self, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            run = Run(self.plan.begins(), self.devices, self._weights())
            on_device = batches.to_device(batch, self.devices[0])
            kind = self.devices[0].type
            loss = run.forward(lambda: self.objective(self.model, on_device, kind))
        set_current(self.devices[0])
        return loss

    def finish(self, step: int) -> None:
        """Do nothing: the pipeline itself times its devices."""

    def seconds(self, step: int) -> float | None:
        """Return how long the group's pipeline ran, with the waits of its devices for each other."""
        return self.stopwatches[0].take(step)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().close()

    def remade(self, model: nn.Module, optimizer: Optimizer) -> PipelineReplica:
        self.close()
        return PipelineReplica(
            self.group, model, optimizer, self.objective, self.timeline, self.plan
        )


class _PipelineStep:
    """One step of one group. One thread issues everything, with each stage's work in the schedule's
    order. The devices run behind and wait for each other; the thread does not wait."""

    def __init__(
        self,
        replica: PipelineReplica,
        weights: Weights,
        context: StepContext,
    ) -> None:
        self._replica = replica
        self._micro_batches = context.micro_batches
        self._weights = weights
        self._context = context
        self._devices = replica.devices
        self._last = len(context.micro_batches) - 1
        self._schedule = schedules.make(replica.plan.schedule, replica.stages, self._last + 1)
        self._apart = [schedules.split(line) for line in self._schedule]
        self._runs: dict[int, Run] = {}
        self._late: dict[int, list[torch.Tensor]] = {}  # reported when complete
        self._losses: list[tuple[Reading, float]] = []
        self._in_detail = context.step % DETAIL_EVERY < DETAIL_STEPS
        self._starts: list[torch.Event] = []

    def run(self) -> list[tuple[Reading, float]]:
        self._starts = [record(device) for device in self._devices]
        try:
            self._issue()
        finally:
            self._runs.clear()  # breaks a reference cycle, so that memory is freed now
        return self._losses

    def _issue(self) -> None:
        work = {"forward": self._forward, "backward": self._backward, "weight": self._weight}
        for issue in schedules.issue_order(self._schedule):
            self._context.events.check()
            work[issue.instruction.kind](issue.stage, issue.instruction.micro)
            if issue.instruction.kind != "forward":
                last = issue.instruction is self._schedule[issue.stage][-1]
                self._time(issue.stage, issue.instruction.kind, last)

    def _time(self, stage: int, kind: str, last: bool) -> None:
        """Time the end of every instruction in detailed steps, in others only of the stage's last."""
        if not self._in_detail and not last:
            return
        stop = record(self._devices[stage])
        kind = ("forward" if kind == "forward" else "backward") if self._in_detail else "compute"
        stopwatch = self._replica.stopwatches[stage]
        stopwatch.time(kind, self._context.step, self._starts[stage], stop, last)
        self._starts[stage] = stop

    def _forward(self, _: int, micro: int) -> None:
        replica, micro_batch = self._replica, self._micro_batches[micro]
        apart = [s for s, micros in enumerate(self._apart) if micro in micros]
        # In the last micro-batch autograd's hooks report each gradient while the backward pass runs.
        # The other schedules' sums are bit for bit autograd's.
        at_once = any(self._apart) and (micro != self._last or not self._context.exchange.several)
        run = self._runs[micro] = Run(
            replica.plan.begins(micro, len(self._micro_batches)),
            self._devices,
            self._weights,
            WeightGradients(apart, at_once, replica.unwatched, self._weights.copied),
            lambda stage: self._time(stage, "forward", False),
        )
        batch = batches.to_device(micro_batch.batch, self._devices[0])
        compute = partial(replica.objective, replica.model, batch, self._devices[0].type)
        self._losses.append((Reading(run.forward(compute)), micro_batch.weight))

    def _backward(self, stage: int, micro: int) -> None:
        run = self._runs[micro]
        device = self._devices[stage]
        if micro == self._last:
            waiting = [p for gradients in self._gradients for p in gradients.waiting(stage)]
            self._late[stage] = waiting + self._weights.shared(stage)
            self._context.exchange.arm(self._context.slot, device, self._late[stage])
        if stage == len(self._devices) - 1:
            assert run.loss is not None
            loss, run.loss = run.loss, None
            weight = self._micro_batches[micro].weight * self._context.scale
            run.backward(stage, [loss], [torch.full_like(loss, weight)])
        else:
            values, grads = run.outgoing(stage)
            if values:
                run.backward(stage, values, grads)
        if stage == 0:
            run.edges.clear()  # frees its activations, except those that deferred gradients need
        if micro == self._last:
            self._finish_copies(stage)

    def _finish_copies(self, stage: int) -> None:
        """Finish the gradients of copied weights after a stage's last backward pass: of the copies that
        it used, because an earlier stage waits for them, and of its own weights' copies."""
        for gradients in self._gradients:
            gradients.run_copies(stage)
        self._weights.add_gradients(stage)
        if not self._apart[stage]:
            self._report(stage)

    def _weight(self, stage: int, micro: int) -> None:
        gradients = self._runs[micro].gradients
        assert gradients is not None
        set_current(self._devices[stage])
        gradients.run(stage)
        if micro == self._last:  # the stage's last instruction
            self._report(stage)

    @property
    def _gradients(self) -> list[WeightGradients]:
        """The deferred gradients of all micro-batches so far, in order."""
        return [run.gradients for run in self._runs.values() if run.gradients is not None]

    def _report(self, stage: int) -> None:
        self._context.exchange.accumulated(self._context.slot, self._late[stage])
