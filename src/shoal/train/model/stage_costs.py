"""What stages cost: the time and memory of a model that is cut somewhere. Pure.

A *unit* is a piece of the model that is never cut, in the order in which the forward pass runs
them. A *stage* is a run of consecutive units on one device. Between two stages is a *cut*. A cut is
*shared* if it lies earlier for some micro-batches of a step: the units in between are computed now by
the one stage, now by the other, so that stages can be equal where units are large. Their weights belong
to the stage before the cut; the stage behind it computes with a copy that lives for one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shoal.train.model import schedules

#: What one device reads of another's memory in a second, on one machine: a copy in memory.
COPY_BYTES_PER_S = 8e9
#: A copy's gradient is read by the weight's owner and added to its own, which is as much again.
GRADIENT_WAYS = 2


@dataclass(frozen=True, slots=True)
class Unit:
    """One piece of a model, as a profile saw it with one micro-batch on a device of speed 1."""

    name: str
    forward_s: float
    backward_s: float
    weight_bytes: int = 0  # parameters and buffers
    activation_bytes: int = 0  # kept from forward to backward, for one micro-batch
    output_bytes: int = 0  # what crosses to the next unit, for one micro-batch
    #: Whether a copy of its weights serves as well: none is changed by a forward pass (buffers) or
    #: used by another unit, and nobody watches their gradients.
    shareable: bool = False

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class StageDevice:
    """What a stage may use. A device of speed 0.5 takes twice a unit's seconds."""

    speed: float = 1.0
    memory_bytes: int = 2**62


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a stage begins."""

    at: int  # its first unit
    shared: int = 0  # units before that, which it computes for some micro-batches
    micros: int = 0  # of a step: for how many

    @property
    def early(self) -> int:
        return self.at - self.shared


@dataclass(frozen=True, slots=True)
class Stage:
    start: int  # first unit
    stop: int  # one behind the last
    device: int  # place in the list of devices
    seconds: float  # forward and backward of a micro-batch in the mean, with what crosses its start
    memory_bytes: int
    shared: int = 0  # last units of the stage before that it computes, too
    shared_micros: int = 0  # for so many micro-batches of a step

    @property
    def cut(self) -> Cut:
        return Cut(self.start, self.shared, self.shared_micros)


@dataclass(frozen=True, slots=True)
class Limits:
    """What decides a stage's memory and its traffic."""

    micro_batches: int = 1
    weight_copies: float = 4.0  # weights, gradients, and two values of state as Adam keeps them
    link_bytes_per_s: float = math.inf
    schedule: str = "zero-bubble"
    copy_bytes_per_s: float = COPY_BYTES_PER_S  # of weights that two stages use

    def timetable(self, stages: int) -> schedules.Schedule:
        return schedules.make(self.schedule, stages, self.micro_batches)

    def kept(self, stages: int) -> list[int]:
        """Micro-batches of which each stage keeps activations at once."""
        return [schedules.in_flight(line) for line in self.timetable(stages)]


def spread(count: int, micro_batches: int) -> frozenset[int]:
    """Which micro-batches begin a stage early: `count` of them, evenly. The last is one of them: the
    stage before then has less to do at the step's end, when it begins the next.

    >>> sorted(spread(2, 4)), sorted(spread(1, 3)), sorted(spread(0, 3))
    ([1, 3], [2], [])
    """
    return frozenset(
        m
        for m in range(micro_batches)
        if (m + 1) * count // micro_batches > m * count // micro_batches
    )


def cuts_of(units: Sequence[Unit], stages: Sequence[Stage]) -> list[Cut]:
    """Where each stage begins, and the end."""
    return [*(s.cut for s in stages), Cut(len(units))]


def make_stage(
    units: Sequence[Unit],
    begin: Cut,
    end: Cut,
    index: int,
    device: StageDevice,
    kept: int,
    limits: Limits,
) -> Stage:
    """The stage between two cuts, on the device at place `index`."""
    each = limits.micro_batches
    compute = sum(
        sum(u.seconds for u in units[a:b]) * count / each
        for a, b, count in _computed(begin, end, each)
    )
    memory = _memory_bytes(units, begin, end, kept, limits)
    seconds = compute / device.speed + _crossing_s(units, begin, limits)
    return Stage(begin.at, end.at, index, seconds, memory, begin.shared, begin.micros)


def stage_memory_bytes(
    units: Sequence[Unit], start: int, stop: int, kept: int, limits: Limits
) -> int:
    """Memory of a stage that keeps the activations of so many micro-batches at once."""
    return _memory_bytes(units, Cut(start), Cut(stop), kept, limits)


def timing(
    units: Sequence[Unit], stages: Sequence[Stage], devices: Sequence[StageDevice], limits: Limits
) -> schedules.Timing:
    """A step on paper, with the time in which stages wait for each other."""
    forward_s = _seconds(units, stages, devices, limits, lambda u: u.forward_s)
    backward_s = _seconds(units, stages, devices, limits, lambda u: u.backward_s)
    for k, stage in enumerate(stages):
        if stage.shared_micros:  # the copy is made when it is first used, and given back at the end
            copy_s = _copy_s(units, stage.cut, limits)
            forward_s[k][min(spread(stage.shared_micros, limits.micro_batches))] += copy_s
            backward_s[k - 1][-1] += GRADIENT_WAYS * copy_s
    points = [p for s in stages[1:] for p in {s.start, s.cut.early}]
    crossing = max((units[p - 1].output_bytes for p in points), default=0)
    return schedules.simulate(
        limits.timetable(len(stages)), forward_s, backward_s, crossing / limits.link_bytes_per_s
    )


def busiest_s(
    units: Sequence[Unit], stages: Sequence[Stage], devices: Sequence[StageDevice], limits: Limits
) -> float:
    """What a step takes at least: the work of the stage that has most of it."""
    work = _seconds(units, stages, devices, limits, lambda u: u.seconds)
    return max(map(sum, work))


def _seconds(
    units: Sequence[Unit],
    stages: Sequence[Stage],
    devices: Sequence[StageDevice],
    limits: Limits,
    of: Callable[[Unit], float],
) -> list[list[float]]:
    """By stage and micro-batch."""
    micros = range(limits.micro_batches)
    until = list(accumulate((of(unit) for unit in units), initial=0.0))
    starts = []
    for cut in cuts_of(units, stages):
        early = spread(cut.micros, limits.micro_batches)
        starts.append([cut.early if m in early else cut.at for m in micros])
    return [
        [(until[starts[k + 1][m]] - until[starts[k][m]]) / devices[s.device].speed for m in micros]
        for k, s in enumerate(stages)
    ]


def _computed(begin: Cut, end: Cut, micro_batches: int) -> list[tuple[int, int, int]]:
    """Runs of units that the stage between two cuts computes, and for how many micro-batches."""
    return [
        (begin.early, begin.at, begin.micros),
        (begin.at, end.early, micro_batches),
        (end.early, end.at, micro_batches - end.micros),
    ]


def _memory_bytes(units: Sequence[Unit], begin: Cut, end: Cut, kept: int, limits: Limits) -> int:
    weights = sum(u.weight_bytes for u in units[begin.at : end.at]) * limits.weight_copies
    copies = sum(u.weight_bytes for u in units[begin.early : begin.at]) * 2  # and their gradients
    activations = sum(
        min(kept, count) * sum(u.activation_bytes for u in units[a:b])
        for a, b, count in _computed(begin, end, limits.micro_batches)
    )
    points = {begin.at, begin.early} if begin.at > 0 else ()
    crossing = max((units[p - 1].output_bytes for p in points), default=0)
    return int(weights) + copies + activations + kept * crossing


def _crossing_s(units: Sequence[Unit], begin: Cut, limits: Limits) -> float:
    """Of a micro-batch in the mean: activations come in and their gradients go back over the cut, and
    in each step what is copied."""
    if begin.at == 0:
        return 0.0
    part = begin.micros / limits.micro_batches
    late, early = units[begin.at - 1].output_bytes, units[begin.early - 1].output_bytes
    crossing = 2 * (late * (1 - part) + early * part) / limits.link_bytes_per_s
    return crossing + _copy_s(units, begin, limits) / limits.micro_batches


def _copy_s(units: Sequence[Unit], cut: Cut, limits: Limits) -> float:
    """How long it takes to copy what stages share."""
    shared = sum(u.weight_bytes for u in units[cut.early : cut.at])
    return shared / min(limits.copy_bytes_per_s, limits.link_bytes_per_s)
