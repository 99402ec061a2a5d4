"""The time and memory of a model in stages. Pure.

A *unit* is a component of the model that is never cut; units are in the order of the forward pass. A
*stage* is a run of consecutive units on one device. Between two stages is a *cut*. A *shared* cut lies
earlier for some micro-batches of a step: either stage computes the units in between, so that stages can
be equal where units are large. Their weights belong to the stage before the cut. The stage after it
computes with a copy that lives for one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shoal.train.model import schedules

#: Speed at which a device reads another's memory on one machine: a copy in memory.
COPY_BYTES_PER_S = 8e9
#: The weight's owner reads a copy's gradient and adds it to its own, which costs the same again.
GRADIENT_WAYS = 2


@dataclass(frozen=True, slots=True)
class Unit:
    """One component of a model, profiled with one micro-batch on a device of speed 1."""

    name: str
    forward_s: float
    backward_s: float
    weight_bytes: int = 0  # parameters and buffers
    activation_bytes: int = 0  # kept from forward to backward, for one micro-batch
    output_bytes: int = 0  # sent to the next unit, for one micro-batch
    #: Whether a copy of its weights serves as well: no forward pass changes them (buffers), no other
    #: unit uses them, and no hook watches their gradients.
    shareable: bool = False

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class StageDevice:
    """A stage's device. With speed 0.5 it takes twice a unit's seconds."""

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
    stop: int  # one after the last
    device: int  # index in the list of devices
    seconds: float  # mean forward and backward of a micro-batch, with its transfers
    memory_bytes: int
    shared: int = 0  # last units of the previous stage that it computes too
    shared_micros: int = 0  # for so many micro-batches of a step

    @property
    def cut(self) -> Cut:
        return Cut(self.start, self.shared, self.shared_micros)


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings that determine a stage's memory and traffic."""

    micro_batches: int = 1
    weight_copies: float = 4.0  # weights, gradients, and two values of state as in Adam
    link_bytes_per_s: float = math.inf
    schedule: str = "zero-bubble"
    copy_bytes_per_s: float = COPY_BYTES_PER_S  # of weights that two stages use

    def timetable(self, stages: int) -> schedules.Schedule:
        return schedules.make(self.schedule, stages, self.micro_batches)

    def kept(self, stages: int) -> list[int]:
        """Return the most micro-batches whose activations each stage keeps at once."""
        return [schedules.in_flight(line) for line in self.timetable(stages)]


def spread(count: int, micro_batches: int) -> frozenset[int]:
    """Choose `count` micro-batches that begin a stage early, evenly spread. The last is one of them:
    the previous stage then has less work at the step's end, when it begins the next step.

    >>> sorted(spread(2, 4)), sorted(spread(1, 3)), sorted(spread(0, 3))
    ([1, 3], [2], [])
    """
    return frozenset(
        m
        for m in range(micro_batches)
        if (m + 1) * count // micro_batches > m * count // micro_batches
    )


def cuts_of(units: Sequence[Unit], stages: Sequence[Stage]) -> list[Cut]:
    """Return the beginning of each stage, and the end."""
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
    """Make the stage between two cuts, on the device with this index."""
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
    """Return the memory of a stage that keeps the activations of so many micro-batches."""
    return _memory_bytes(units, Cut(start), Cut(stop), kept, limits)


def timing(
    units: Sequence[Unit], stages: Sequence[Stage], devices: Sequence[StageDevice], limits: Limits
) -> schedules.Timing:
    """Simulate a step, with the time in which stages wait for each other."""
    forward_s = _seconds(units, stages, devices, limits, lambda u: u.forward_s)
    backward_s = _seconds(units, stages, devices, limits, lambda u: u.backward_s)
    for k, stage in enumerate(stages):
        if stage.shared_micros:  # copied at the first use, its gradient returned at the end
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
    """Return a lower bound of a step: the work of the busiest stage."""
    work = _seconds(units, stages, devices, limits, lambda u: u.seconds)
    return max(map(sum, work))


def _seconds(
    units: Sequence[Unit],
    stages: Sequence[Stage],
    devices: Sequence[StageDevice],
    limits: Limits,
    of: Callable[[Unit], float],
) -> list[list[float]]:
    """Return seconds by stage and micro-batch."""
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
    """Return the runs of units that a stage computes, and for how many micro-batches."""
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
    """Return the mean seconds of a micro-batch's transfers over the cut: activations, their gradients,
    and the copied weights of each step."""
    if begin.at == 0:
        return 0.0
    fraction = begin.micros / limits.micro_batches
    late, early = units[begin.at - 1].output_bytes, units[begin.early - 1].output_bytes
    crossing = 2 * (late * (1 - fraction) + early * fraction) / limits.link_bytes_per_s
    return crossing + _copy_s(units, begin, limits) / limits.micro_batches


def _copy_s(units: Sequence[Unit], cut: Cut, limits: Limits) -> float:
    """Return the seconds to copy the shared weights."""
    shared = sum(u.weight_bytes for u in units[cut.early : cut.at])
    return shared / min(limits.copy_bytes_per_s, limits.link_bytes_per_s)
