"""Where to cut a model into stages: dynamic programming over its units' costs. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from shoal.train.model import schedules
from shoal.train.model.stage_costs import (
    Cut,
    Limits,
    Stage,
    StageDevice,
    Unit,
    busiest_s,
    cuts_of,
    make_stage,
    stage_memory_bytes,
    timing,
)
from shoal.units import show_bytes

#: Orders of devices whose slowest stage is within this factor of the best are simulated.
NEAR = 1.25
REFINED_MAX = 12  # orders: six unequal devices have 720
#: All orders are tried for up to this many devices; more keep their order.
PERMUTED_DEVICES_MAX = 6
#: A cut is shared if that shortens the step by this fraction: copies have a cost.
SHARING_GAIN_MIN = 0.03
#: The most units that a cut shares, and the search distance from a whole cut.
SHARED_UNITS_MAX, SHARED_WITHIN = 2, 3
#: Fractions of the micro-batches to try for a cut, and whole cuts to start from.
SHARED_FRACTIONS, SHARED_FROM = 8, 2


class CannotPartition(ValueError):
    """No cut exists; the text names the limit."""


def partition(
    units: Sequence[Unit], devices: Sequence[StageDevice], limits: Limits | None = None
) -> tuple[Stage, ...]:
    """Cut `units` into one stage for each device so that a step is as short as possible.

    Every stage has at least one unit and fits its device's memory. The devices may change their order:
    a slow one gets a stage that suits it. Cuts are shared if stages would be unequal otherwise and the
    schedule defers gradients.

    >>> units = [Unit(str(i), 1.0, 2.0) for i in range(6)]
    >>> [(s.start, s.stop) for s in partition(units, [StageDevice(), StageDevice(speed=0.5)])]
    [(0, 4), (4, 6)]
    """
    limits = limits or Limits()
    if not devices:
        raise CannotPartition("there are no devices for the stages")
    if len(units) < len(devices):
        raise CannotPartition(
            f"the model has {len(units)} unit(s), fewer than the {len(devices)} devices of the group; "
            "use fewer devices in a group"
        )

    def seconds(stages: tuple[Stage, ...]) -> float:
        return step_seconds(units, stages, devices, limits)

    whole = sorted(_whole(units, devices, limits), key=seconds)
    shared = min((_share(units, s, devices, limits) for s in whole[:SHARED_FROM]), key=seconds)
    return shared if seconds(shared) < seconds(whole[0]) * (1 - SHARING_GAIN_MIN) else whole[0]


def _whole(
    units: Sequence[Unit], devices: Sequence[StageDevice], limits: Limits
) -> list[tuple[Stage, ...]]:
    """Return the best cut without sharing, for each of the best orders of devices."""

    @cache  # many orders have many stages in common
    def stage(start: int, stop: int, device: int, kept: int) -> Stage:
        ends = Cut(start), Cut(stop)
        return make_stage(units, *ends, device, devices[device], kept, limits)

    def slowest(stages: tuple[Stage, ...]) -> float:
        return max(stage.seconds for stage in stages)

    kept = limits.kept(len(devices))
    found = [
        _partition_in_order(len(units), devices, order, kept, stage) for order in _orders(devices)
    ]
    fitting = sorted((stages for stages in found if stages is not None), key=slowest)
    if not fitting:
        raise CannotPartition(_why_not(units, devices, limits))
    near = [stages for stages in fitting if slowest(stages) <= NEAR * slowest(fitting[0])]
    return [_refine(units, stages, devices, limits) for stages in near[:REFINED_MAX]]


def partition_fitting(
    units: Sequence[Unit], devices: Sequence[StageDevice], limits: Limits
) -> tuple[tuple[Stage, ...], Limits]:
    """Call `partition`, with a schedule that needs less memory if this one does not fit. Return the
    limits that it used."""
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
    """Return the seconds of a step, with the time in which stages wait for each other."""
    return timing(units, stages, devices, limits).total_s


def _refine(
    units: Sequence[Unit],
    stages: tuple[Stage, ...],
    devices: Sequence[StageDevice],
    limits: Limits,
) -> tuple[Stage, ...]:
    """Move cuts by a unit or two if that shortens the step. The first stages start sooner and end later
    than the last, so equal stages are not optimal."""
    best = stages
    best_s = step_seconds(units, stages, devices, limits)
    moved = True
    while moved:
        moved = False
        for cut, by in itertools.product(range(1, len(best)), (-2, -1, 1, 2)):
            moved_cut = Cut(best[cut].start + by)
            tried = _with_cut(units, best, cut, moved_cut, devices, limits)
            if tried is None:
                continue
            seconds = step_seconds(units, tried, devices, limits)
            if seconds < best_s * (1 - 1e-9):
                best, best_s, moved = tried, seconds, True
    return best


def _with_cut(
    units: Sequence[Unit],
    stages: tuple[Stage, ...],
    index: int,
    cut: Cut,
    devices: Sequence[StageDevice],
    limits: Limits,
) -> tuple[Stage, ...] | None:
    """Change the start of stage `index`. Return None if a stage is then empty for some micro-batch, or
    too large."""
    cuts = cuts_of(units, stages)
    cuts[index] = cut
    if not (cuts[index - 1].at < cut.early and cut.at < cuts[index + 1].early):
        return None
    kept = limits.kept(len(stages))
    changed = tuple(
        make_stage(units, a, b, s.device, devices[s.device], k, limits)
        for k, s, (a, b) in zip(kept, stages, itertools.pairwise(cuts), strict=True)
    )
    fits = all(s.memory_bytes <= devices[s.device].memory_bytes for s in changed)
    return changed if fits else None


def _share(
    units: Sequence[Unit],
    stages: tuple[Stage, ...],
    devices: Sequence[StageDevice],
    limits: Limits,
) -> tuple[Stage, ...]:
    """Share cuts between neighbours, one by one, as long as that shortens the step."""
    if not schedules.defers(limits.schedule) or limits.micro_batches < 2:
        return stages
    best, moved = stages, True
    best_s = step_seconds(units, stages, devices, limits)
    while moved:
        moved = False
        for index in range(1, len(stages)):
            for cut in _shared_cuts(units, best[index].start, limits.micro_batches):
                tried = _with_cut(units, best, index, cut, devices, limits)
                if tried is None or busiest_s(units, tried, devices, limits) >= best_s:
                    continue
                seconds = step_seconds(units, tried, devices, limits)
                if seconds < best_s * (1 - 1e-9):
                    best, best_s, moved = tried, seconds, True
    return best


def _shared_cuts(units: Sequence[Unit], near: int, micro_batches: int) -> Iterator[Cut]:
    """Yield shared cuts around a unit."""
    steps = range(1, SHARED_FRACTIONS)
    counts = {round(micro_batches * i / SHARED_FRACTIONS) for i in steps} - {0, micro_batches}
    for at in range(max(1, near - SHARED_WITHIN), min(len(units), near + SHARED_WITHIN + 1)):
        for shared in range(1, min(SHARED_UNITS_MAX, at - 1) + 1):
            if not all(unit.shareable for unit in units[at - shared : at]):
                break
            for count in sorted(counts):
                yield Cut(at, shared, count)


def _orders(devices: Sequence[StageDevice]) -> list[tuple[int, ...]]:
    """Return the distinct orders of the devices; the given one first."""
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
    count: int,
    devices: Sequence[StageDevice],
    order: Sequence[int],
    kept: Sequence[int],
    stage_of: Callable[[int, int, int, int], Stage],
) -> tuple[Stage, ...] | None:
    """Find the best stages in one order by dynamic programming.

    best[stop] after k stages: the slowest of the first k stages that hold units[:stop].
    """
    depth = len(order)
    best: list[float] = [0.0] + [math.inf] * count
    choices: list[list[Stage | None]] = []
    for k, device in enumerate(order):
        after: list[float] = [math.inf] * (count + 1)
        chosen: list[Stage | None] = [None] * (count + 1)
        for stop in range(k + 1, count - (depth - k - 1) + 1):
            for start in range(k, stop):
                if best[start] >= after[stop]:
                    continue
                stage = stage_of(start, stop, device, kept[k])
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


def _why_not(units: Sequence[Unit], devices: Sequence[StageDevice], limits: Limits) -> str:
    need = sum(stage_memory_bytes(units, i, i + 1, 1, limits) for i in range(len(units)))
    largest = max(range(len(units)), key=lambda i: stage_memory_bytes(units, i, i + 1, 1, limits))
    return (
        f"the model does not fit: it needs at least {show_bytes(need)}, its largest unit "
        f"({units[largest].name}) "
        f"{show_bytes(stage_memory_bytes(units, largest, largest + 1, 1, limits))}, and the "
        f"devices have {', '.join(show_bytes(d.memory_bytes) for d in devices)}. "
        "Use more devices in a group, or smaller micro-batches (micro_batches=…)"
    )
