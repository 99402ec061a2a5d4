"""From a model and groups to replicas: profile, cut, place and copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.train.data import batches
from shoal.train.group import batch_split
from shoal.train.group.devices import Member, set_current
from shoal.train.group.errors import CannotCut, TrainError
from shoal.train.group.groups import WorkerGroup, WorkerGroups, group_error
from shoal.train.group.timeline import Timeline
from shoal.train.model import plan, schedules
from shoal.train.model.partition import CannotPartition, partition_fitting
from shoal.train.model.pipeline import PipelineReplica, StagePlan
from shoal.train.model.profile import ModelProfile, measure_speeds, profile
from shoal.train.model.replicas import Objective, Replica, clone, place
from shoal.train.model.schedules import SCHEDULES, InvalidSchedule
from shoal.train.model.stage_costs import COPY_BYTES_PER_S, Limits, StageDevice

#: Without deferred gradients: more fill a pipeline better, fewer are larger and compute better.
MICRO_BATCHES_PER_STAGE = 4
#: Rows that a product with a weight should have in a micro-batch. With fewer rows, reading the weights
#: costs more than the product.
ROWS_MIN = 64
ROOMY = 2  # times as many rows: then one more micro-batch costs little
UNEVEN = 1.05  # from this ratio of the largest micro-batch to the mean, one more is better
#: Of weights that two stages share, unless both are known to be on this machine.
NETWORK_BYTES_PER_S = 1e9
#: Between the seeds of groups: random numbers differ between groups, as between samples.
SEED_STRIDE = 1_000_003


class Builder:
    """Makes the replicas of a trainer."""

    def __init__(
        self, micro_batches: int | None, schedule: str, tell: Callable[[Any], None]
    ) -> None:
        if micro_batches is not None and micro_batches < 1:
            raise ValueError(f"micro_batches must be at least 1 (got {micro_batches})")
        if schedule not in SCHEDULES:
            raise InvalidSchedule(f"{schedule!r} is not a schedule; use {' or '.join(SCHEDULES)}")
        self._micro_batches = micro_batches
        self._speeds: dict[Member, float] = {}  # if there are several
        self._samples = 0  # of a group, in the first batch
        self._most: int | None = None  # micro-batches with enough rows each, once profiled
        self._schedule = schedule
        self._tell = tell

    def micro_batches_for(self, stages: int) -> int:
        if self._micro_batches is not None:
            return self._micro_batches
        if stages == 1:
            return 1
        defers = schedules.defers(self._schedule)
        wanted = schedules.enough(stages) if defers else MICRO_BATCHES_PER_STAGE * stages
        if self._most is None:
            return wanted
        largest = max(batch_split.chunk_sizes(self._samples, wanted), default=0)
        uneven = largest * wanted > UNEVEN * self._samples
        if defers and uneven and ROOMY * (wanted + 1) <= self._most:
            wanted += 1
        return max(stages, min(self._most, wanted))

    def build(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        groups: WorkerGroups,
        objective: Objective,
        timeline: Timeline,
        batch: Any,
        step: int,
    ) -> list[Replica]:
        """Make one replica for each group; the first is the model itself. `step` is for errors."""
        found: ModelProfile | None = None
        self._speeds = _speeds(groups.members) if len(groups.members) > 1 else {}
        if groups.automatic or max(groups.shape) > 1:
            found = self._profile(model, objective, batch, groups, step)
            self._samples = batches.size(batch) // max(1, len(groups.shape))
            self._most = max(1, int(self._samples * found.rows_per_sample / ROWS_MIN))
        if groups.automatic and not len(groups):
            assert found is not None
            groups.form(self._choose(found, groups, batch))
        plans = [self._plan(found, group) for group in groups]
        twins = [(model, optimizer)] + [clone(model, optimizer) for _ in plans[1:]]
        replicas = []
        for group, cut, (twin, optim) in zip(groups, plans, twins, strict=True):
            if cut is None:
                replicas.append(Replica(group, twin, optim, objective, timeline))
            else:
                replicas.append(PipelineReplica(group, twin, optim, objective, timeline, cut))
            _seed(group)
        return replicas

    def speed(self, group: WorkerGroup) -> float:
        """Return the mean speed of a group's devices."""
        return statistics.fmean(self._speeds.get(member, 1.0) for member in group.members)

    def _profile(
        self, model: nn.Module, objective: Objective, batch: Any, groups: WorkerGroups, step: int
    ) -> ModelProfile:
        """Profile one micro-batch on the first device; on the CPU if it does not fit there."""
        samples = self._profiled_samples(groups, batch)
        micro_batch = batches.split(batch, [samples])[0]
        homes = {n: t.device for n, t in [*model.named_parameters(), *model.named_buffers()]}
        device = groups.members[0].device

        def on(where: torch.device) -> ModelProfile:
            place(model, None, lambda _: where)
            moved = batches.to_device(micro_batch, where)
            return profile(model, lambda: objective(model, moved, where.type), where, samples)

        try:
            set_current(device)
            try:
                return on(device)
            except torch.OutOfMemoryError:
                return on(torch.device("cpu"))
        except TrainError:
            raise
        except Exception as error:
            members = groups[0].members if len(groups) else groups.members[:1]
            raise group_error(0, members, error, step) from error
        finally:
            place(model, None, lambda name: homes[name])

    def _profiled_samples(self, groups: WorkerGroups, batch: Any) -> int:
        shape = groups.shape or (1,)
        per_group = batches.size(batch) // len(shape)
        sizes = batch_split.chunk_sizes(max(1, per_group), self.micro_batches_for(max(shape)))
        return sizes[0]

    def _choose(
        self,
        found: ModelProfile,
        groups: WorkerGroups,
        batch: Any,
    ) -> list[list[int]]:
        choice = plan.choose(
            found.units,
            [StageDevice(self._speeds.get(m, 1.0), m.memory_bytes) for m in groups.members],
            batches.size(batch),
            self._profiled_samples(groups, batch),
            micro_batches=self.micro_batches_for,
        )
        self._tell(choice.table())
        return [list(group) for group in choice.best.layout]

    def _plan(self, found: ModelProfile | None, group: WorkerGroup) -> StagePlan | None:
        if len(group.members) == 1:
            return None
        assert found is not None
        devices = [StageDevice(self._speeds[m], m.memory_bytes) for m in group.members]
        micros = self.micro_batches_for(len(devices))
        here = all(m.worker_pid for m in group.members)
        copies = COPY_BYTES_PER_S if here else NETWORK_BYTES_PER_S
        try:
            limits = Limits(micros, schedule=self._schedule, copy_bytes_per_s=copies)
            return StagePlan.of(found, *partition_fitting(found.units, devices, limits))
        except CannotPartition as error:
            why = error
        cuts = ", ".join(unit.name for unit in found.units[1:]) or "nowhere"
        raise CannotCut(
            f"{group} has {len(devices)} devices, but {why}. The model can be cut before: "
            f"{cuts}. For more cuts, call shoal.train.cut('name') in its forward, where every "
            "forward pass executes it once"
        )


def _speeds(members: Sequence[Member]) -> dict[Member, float]:
    """Return the devices' speeds relative to the first, which is the one that is profiled."""
    measured = dict(zip(members, measure_speeds([m.device for m in members]), strict=True))
    first = measured[members[0]]
    # Differences of a few percent are noise and would only move cuts around.
    return {m: 1.0 if abs(s / first - 1) < 0.1 else s / first for m, s in measured.items()}


def _seed(group: WorkerGroup) -> None:
    """Give each further group another sequence of random numbers (dropout)."""
    if group.index == 0:
        return
    for i, member in enumerate(group.members):
        generator = torch.get_device_module(member.device).default_generator(member.device)
        generator.manual_seed((torch.initial_seed() + SEED_STRIDE * (group.index * 64 + i)) % 2**63)
