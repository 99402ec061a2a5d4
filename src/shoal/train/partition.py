"""Where to cut a model into stages: dynamic programming over its units' costs. Pure.

A *unit* is a piece of the model that is never cut, in the order in which the forward pass runs
them. A *stage* is a run of consecutive units on one device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shoal.train import schedules

#: Orders of the devices whose slowest stage is so near to the best are compared by the whole step.
NEAR = 1.25
#: All orders of the devices are tried up to this many; beyond it they keep the order they came in.
PERMUTED_DEVICES_MAX = 6


class CannotPartition(ValueError):
    """No cut exists; the text says which limit is in the way."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One piece of a model, as a profile saw it with one micro-batch on a device of speed 1."""

    name: str
    forward_s: float
    backward_s: float
    weight_bytes: int = 0  # parameters and buffers
    activation_bytes: int = 0  # kept from forward to backward, for one micro-batch
    output_bytes: int = 0  # what crosses to the next unit, for one micro-batch

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class StageDevice:
    """What a stage may use. A device of speed 0.5 takes twice a unit's seconds."""

    speed: float = 1.0
    memory_bytes: int = 2**62


@dataclass(frozen=True, slots=True)
class Stage:
    start: int  # first unit
    stop: int  # one behind the last
    device: int  # place in the list of devices
    seconds: float  # forward and backward of one micro-batch, with what crosses its start
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What decides a stage's memory and its traffic."""

    micro_batches: int = 1
    weight_copies: float = 4.0  # weights, gradients, and two values of state as Adam keeps them
    link_bytes_per_s: float = math.inf
    schedule: str = "zero-bubble"

    def timetable(self, stages: int) -> schedules.Schedule:
        return schedules.make(self.schedule, stages, self.micro_batches)

    def kept(self, stages: int) -> list[int]:
        """Micro-batches of which each stage keeps activations at once."""
        return [schedules.in_flight(line) for line in self.timetable(stages)]


def partition(
    units: Sequence[Unit], devices: Sequence[StageDevice], limits: Limits | None = None
) -> tuple[Stage, ...]:
    """Cuts `units` into one stage for each device so that a step is as short as possible.

    Every stage has at least one unit and fits its device's memory. Devices may be put in another
    order: a slow one gets the stage that suits it.

    >>> units = [Unit(str(i), 1.0, 2.0) for i in range(6)]
    >>> [(s.start, s.stop) for s in partition(units, [StageDevice(), StageDevice(speed=0.5)])]
    [(0, 4), (4, 6)]
    """
    limits = limits or Limits()
    if not devices:
        raise CannotPartition("there are no devices to put stages on")
    if len(units) < len(devices):
        raise CannotPartition(
            f"the model has {len(units)} unit(s) that may be separated, fewer than the "
            f"{len(devices)} devices of the group; use fewer devices in a group"
        )
    found = [_partition_in_order(units, devices, order, limits) for order in _orders(devices)]
    fitting = [stages for stages in found if stages is not None]
    if not fitting:
        raise CannotPartition(_why_not(units, devices, limits))
    slowest = min(max(stage.seconds for stage in stages) for stages in fitting)
    near = [s for s in fitting if max(stage.seconds for stage in s) <= NEAR * slowest]
    refined = [_refine(units, stages, devices, limits) for stages in near]
    return min(refined, key=lambda stages: step_seconds(units, stages, devices, limits))


def partition_fitting(
    units: Sequence[Unit], devices: Sequence[StageDevice], limits: Limits
) -> tuple[tuple[Stage, ...], Limits]:
    """Like `partition`; where the schedule needs too much memory, with one that needs less. Returns
    what it used."""
    while True:
        try:
            return partition(units, devices, limits), limits
        except CannotPartition:
            if limits.schedule not in schedules.LEANER:
                raise
        limits = replace(limits, schedule=schedules.LEANER[limits.schedule])


def step_seconds(
    units: Sequence[Unit], stages: Sequence[Stage], devices: Sequence[StageDevice], limits: Limits
) -> float:
    """How long a step takes, with the time in which stages wait for each other."""

    def seconds(of: Callable[[Unit], float]) -> list[float]:
        return [
            sum(of(u) for u in units[s.start : s.stop]) / devices[s.device].speed for s in stages
        ]

    crossing = max((units[s.start - 1].output_bytes for s in stages[1:]), default=0)
    return schedules.simulate(
        limits.timetable(len(stages)),
        seconds(lambda u: u.forward_s),
        seconds(lambda u: u.backward_s),
        crossing / limits.link_bytes_per_s,
    ).total_s


def _refine(
    units: Sequence[Unit],
    stages: tuple[Stage, ...],
    devices: Sequence[StageDevice],
    limits: Limits,
) -> tuple[Stage, ...]:
    """Moves cuts by a unit or two where that shortens the step: the first stages start sooner and end
    later than the last, so equal stages are not the best."""
    best = stages
    best_s = step_seconds(units, stages, devices, limits)
    moved = True
    while moved:
        moved = False
        for cut, by in itertools.product(range(1, len(best)), (-2, -1, 1, 2)):
            tried = _moved(units, best, cut, by, devices, limits)
            if tried is None:
                continue
            seconds = step_seconds(units, tried, devices, limits)
            if seconds < best_s * (1 - 1e-9):
                best, best_s, moved = tried, seconds, True
    return best


def _moved(
    units: Sequence[Unit],
    stages: tuple[Stage, ...],
    cut: int,
    by: int,
    devices: Sequence[StageDevice],
    limits: Limits,
) -> tuple[Stage, ...] | None:
    """The stages with the start of stage `cut` moved; None if a stage is empty then, or too large."""
    edges = [s.start for s in stages] + [len(units)]
    edges[cut] += by
    if not edges[cut - 1] < edges[cut] < edges[cut + 1]:
        return None
    kept = limits.kept(len(stages))
    changed = tuple(
        _stage(units, a, b, s.device, devices[s.device], k, limits)
        for k, s, (a, b) in zip(kept, stages, itertools.pairwise(edges), strict=True)
    )
    fits = all(s.memory_bytes <= devices[s.device].memory_bytes for s in changed)
    return changed if fits else None


def stage_memory_bytes(
    units: Sequence[Unit], start: int, stop: int, kept: int, limits: Limits
) -> int:
    """Memory of a stage that keeps the activations of so many micro-batches at once."""
    weights = sum(u.weight_bytes for u in units[start:stop])
    activations = sum(u.activation_bytes for u in units[start:stop])
    crossing = units[start - 1].output_bytes if start > 0 else 0
    return int(weights * limits.weight_copies) + kept * (activations + crossing)


def _orders(devices: Sequence[StageDevice]) -> list[tuple[int, ...]]:
    """Orders that differ in more than equal devices changing places; the given one first."""
    given = tuple(range(len(devices)))
    if len(devices) > PERMUTED_DEVICES_MAX:
        return [given]
    seen, orders = set(), []
    for order in itertools.permutations(given):
        kinds = tuple(devices[i] for i in order)
        if kinds not in seen:
            seen.add(kinds)
            orders.append(order)
    return orders


def _partition_in_order(
    units: Sequence[Unit], devices: Sequence[StageDevice], order: Sequence[int], limits: Limits
) -> tuple[Stage, ...] | None:
    """best[stop] after k stages: the slowest of the first k stages that hold units[:stop]."""
    count, depth = len(units), len(order)
    best: list[float] = [0.0] + [math.inf] * count
    choices: list[list[Stage | None]] = []
    kept = limits.kept(depth)
    for k, device in enumerate(order):
        after: list[float] = [math.inf] * (count + 1)
        chosen: list[Stage | None] = [None] * (count + 1)
        for stop in range(k + 1, count - (depth - k - 1) + 1):
            for start in range(k, stop):
                if best[start] >= after[stop]:
                    continue
                stage = _stage(units, start, stop, device, devices[device], kept[k], limits)
                slowest = max(best[start], stage.seconds)
                if slowest < after[stop] and stage.memory_bytes <= devices[device].memory_bytes:
                    after[stop], chosen[stop] = slowest, stage
        best = after
        choices.append(chosen)
    if math.isinf(best[count]):
        return None
    stages: list[Stage] = []
    stop = count
    for chosen in reversed(choices):
        found = chosen[stop]
        assert found is not None
        stages.append(found)
        stop = found.start
    return tuple(reversed(stages))


def _stage(
    units: Sequence[Unit],
    start: int,
    stop: int,
    index: int,
    device: StageDevice,
    kept: int,
    limits: Limits,
) -> Stage:
    compute = sum(u.seconds for u in units[start:stop]) / device.speed
    # Activations come in and their gradients go back over the same cut.
    crossing = 2 * units[start - 1].output_bytes / limits.link_bytes_per_s if start > 0 else 0.0
    memory = stage_memory_bytes(units, start, stop, kept, limits)
    return Stage(start, stop, index, compute + crossing, memory)


def _why_not(units: Sequence[Unit], devices: Sequence[StageDevice], limits: Limits) -> str:
    need = sum(stage_memory_bytes(units, i, i + 1, 1, limits) for i in range(len(units)))
    largest = max(range(len(units)), key=lambda i: stage_memory_bytes(units, i, i + 1, 1, limits))
    return (
        f"the model does not fit: it needs at least {need / 2**20:.0f} MiB, its largest unit "
        f"({units[largest].name}) "
        f"{stage_memory_bytes(units, largest, largest + 1, 1, limits) / 2**20:.0f} MiB, and the "
        f"devices have {', '.join(f'{d.memory_bytes / 2**20:.0f}' for d in devices)} MiB. "
        "Use more devices in a group, or smaller micro-batches (micro_batches=…)"
    )
