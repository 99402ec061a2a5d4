"""A model in stages over the devices of one group, with micro-batches in a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.train import batches, schedules
from shoal.train.board import Aborted, Board
from shoal.train.devices import Reading, record, set_current
from shoal.train.groups import WorkerGroup
from shoal.train.partition import Stage
from shoal.train.profile import ModelProfile
from shoal.train.replicas import Objective, Part, Replica, StepContext
from shoal.train.stages import Run, Weights, watch_modules
from shoal.train.threads import DaemonPool
from shoal.train.timeline import Timeline

#: Steps of which the timeline has every forward and backward; of the others it has the sum. To time a
#: piece costs a wake-up, and small pieces are many.
DETAIL_EVERY, DETAIL_STEPS = 16, 2


@dataclass(frozen=True)
class StagePlan:
    """Where a model is cut for one group."""

    stages: tuple[Stage, ...]
    begins: dict[str, int]  # point -> stage that begins there
    stage_of: dict[str, int]  # parameter or buffer -> stage

    @staticmethod
    def of(profile: ModelProfile, stages: Sequence[Stage]) -> StagePlan:
        begins = {profile.units[s.start].name: i for i, s in enumerate(stages) if i > 0}
        stage_of_unit = {u: i for i, s in enumerate(stages) for u in range(s.start, s.stop)}
        owner = {name: stage_of_unit[unit] for name, unit in profile.weights.items()}
        return StagePlan(tuple(stages), begins, owner)


class PipelineReplica(Replica):
    """A model that is cut into stages, one on each device of its group."""

    def __init__(
        self,
        group: WorkerGroup,
        model: nn.Module,
        optimizer: Optimizer,
        objective: Objective,
        timeline: Timeline,
        plan: StagePlan,
        schedule: str,
    ) -> None:
        self.plan = plan
        self.schedule = schedule
        self._members = [group.members[stage.device] for stage in plan.stages]
        self._devices = [member.device for member in self._members]
        super().__init__(group, model, optimizer, objective, timeline)
        self._hooks = watch_modules(model, list(plan.begins))
        self._threads = DaemonPool(f"shoal-stage-{group.index}")

    @property
    def used_members(self) -> Sequence[Any]:
        return self._members

    @property
    def stages(self) -> int:
        return len(self.plan.stages)

    def device_of(self, name: str) -> torch.device:
        # A tied weight may carry any of its names; the profile knows the first.
        device: torch.device = self._devices[self.plan.stage_of.get(name, 0)]
        return device

    def _weights(self) -> Weights:
        names = [*self.model.named_parameters(), *self.model.named_buffers()]
        return Weights({id(t): self.plan.stage_of.get(n, 0) for n, t in names})

    def forward_backward(
        self, parts: Sequence[Part], context: StepContext
    ) -> list[tuple[Reading, float]]:
        if not parts:
            return []
        schedule = schedules.make(self.schedule, self.stages, len(parts))
        weights = self._weights()
        board = _GroupBoard(context.board, self.group.index)
        runs = [
            Run(m, self.plan.begins, self._devices, weights, board, context.timeout_s)
            for m in range(len(parts))
        ]
        step = _PipelineStep(self, parts, runs, weights, context, board)
        futures = [
            self._threads.submit(partial(step.run_stage, stage, line))
            for stage, line in enumerate(schedule)
        ]
        _finish(futures)
        return step.losses

    def evaluate(self, batch: Any, board: Board, timeout_s: float) -> torch.Tensor:
        with torch.no_grad():
            run = Run(0, self.plan.begins, self._devices, self._weights(), board, timeout_s)
            for stage in range(self.stages):
                board.mark(("go", 0, stage))
            on_device = batches.to_device(batch, self._devices[0])
            kind = self._devices[0].type
            run.body(lambda: self.objective(self.model, on_device, kind))
        assert run.loss is not None
        set_current(self._devices[0])
        return run.loss

    def seconds(self, step: int) -> float | None:
        """How long the group's pipeline ran: its devices wait for each other in it."""
        took = self.stopwatches[0].take(step)
        return took.whole_s if took is not None else None

    def start(self, work: Callable[[], None]) -> None:
        self._threads.submit(work)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().close()

    def remade(self, model: nn.Module, optimizer: Optimizer) -> PipelineReplica:
        self.close()
        return PipelineReplica(
            self.group, model, optimizer, self.objective, self.timeline, self.plan, self.schedule
        )


class _GroupBoard(Board):
    """A step's board as one group sees it: its marks are its own, its failures everybody's."""

    def __init__(self, shared: Board, group: int) -> None:
        super().__init__()
        self._shared = shared
        self._group = group

    def mark(self, key: Any) -> None:
        self._shared.mark((self._group, key))

    def check(self) -> None:
        self._shared.check()

    def wait(self, key: Any, what: str, timeout_s: float) -> None:
        self._shared.wait((self._group, key), what, timeout_s)

    def fail(self, group: int, error: BaseException) -> None:
        self._shared.fail(group, error)


class _PipelineStep:
    """One step of one group: a thread for each stage, and one for each forward pass under way."""

    def __init__(
        self,
        replica: PipelineReplica,
        parts: Sequence[Part],
        runs: Sequence[Run],
        weights: Weights,
        context: StepContext,
        board: Board,
    ) -> None:
        self._replica = replica
        self._parts = parts
        self._runs: list[Run | None] = list(runs)
        self._weights = weights
        self._context = context
        self._board = board
        self._last = replica.stages - 1
        self._devices = replica._devices
        self._losses: dict[int, Reading] = {}

    @property
    def losses(self) -> list[tuple[Reading, float]]:
        return [(self._losses[m], part.weight) for m, part in enumerate(self._parts)]

    def run_stage(self, stage: int, line: Sequence[schedules.Instruction]) -> None:
        """The instructions of one stage, in order."""
        device = self._devices[stage]
        stopwatch = self._replica.stopwatches[stage]
        try:
            set_current(device)
            step = self._context.step
            in_detail = step % DETAIL_EVERY < DETAIL_STEPS
            start = record(device)
            for instruction in line:
                self._board.check()
                work = self._forward if instruction.kind == "forward" else self._backward
                self._await_neighbour(stage, instruction)
                work(stage, instruction.micro)
                last = instruction is line[-1]
                if in_detail or last:
                    kind = instruction.kind if in_detail else "compute"
                    stop = record(device)
                    stopwatch.time(kind, step, start, stop, last)
                    start = stop
        except BaseException as error:
            self._board.fail(self._replica.group.index, error)
            raise

    def _await_neighbour(self, stage: int, instruction: schedules.Instruction) -> None:
        micro, timeout_s = instruction.micro, self._context.timeout_s
        if instruction.kind == "forward" and stage > 0:
            key, what = ("forward", micro, stage - 1), f"the output of stage {stage - 1}"
        elif instruction.kind == "backward" and stage < self._last:
            key, what = ("backward", micro, stage + 1), f"gradients of stage {stage + 1}"
        else:
            return
        self._board.wait(key, f"{what} for micro-batch {micro}", timeout_s)

    def _forward(self, stage: int, micro: int) -> None:
        run = self._run(micro)
        if stage == 0:
            batch = batches.to_device(self._parts[micro].batch, self._devices[0])
            self._replica.start(partial(self._whole_forward, run, batch))
        else:
            self._board.mark(("go", micro, stage))
        what = f"the forward pass of micro-batch {micro} in stage {stage}"
        self._board.wait(("forward", micro, stage), what, self._context.timeout_s)

    def _whole_forward(self, run: Run, batch: Any) -> None:
        replica = self._replica
        try:
            run.body(lambda: replica.objective(replica.model, batch, self._devices[0].type))
        except BaseException as error:
            self._board.fail(replica.group.index, error)

    def _backward(self, stage: int, micro: int) -> None:
        run = self._run(micro)
        device = self._devices[stage]
        if micro == len(self._parts) - 1:
            self._weights.add_gradients(stage)  # all later stages are done with this step
            self._context.exchange.arm(self._context.slot, device)
        if stage == self._last:
            assert run.loss is not None
            self._losses[micro] = Reading(run.loss)
            (run.loss * self._parts[micro].weight).backward()  # type: ignore[no-untyped-call]
            run.loss = None
        else:
            sources, grads = run.outgoing(stage)
            if sources:
                torch.autograd.backward(sources, grads)
        run.edges[stage] = run.edges[stage] if stage > 0 else []
        self._board.mark(("backward", micro, stage))
        if stage == 0:
            self._runs[micro] = None  # its activations are free

    def _run(self, micro: int) -> Run:
        run = self._runs[micro]
        assert run is not None
        return run


def _finish(futures: Sequence[Future[None]]) -> None:
    """Waits for all stages; raises what went wrong, rather than what followed from it."""
    errors = [e for e in (future.exception() for future in futures) if e is not None]
    real = [e for e in errors if not isinstance(e, Aborted)]
    if errors:
        raise (real or errors)[0]
