"""Stages by dynamic programming: against trying everything."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.train.model import schedules
from shoal.train.model.partition import (
    SHARING_GAIN_MIN,
    CannotPartition,
    partition,
    step_seconds,
)
from shoal.train.model.stage_costs import (
    Cut,
    Limits,
    Stage,
    StageDevice,
    Unit,
    busiest_s,
    cuts_of,
    make_stage,
    spread,
    stage_memory_bytes,
    timing,
)

seconds = st.integers(1, 50).map(float)
sizes = st.integers(0, 100)
units_lists = st.lists(
    st.builds(
        Unit,
        name=st.just("u"),
        forward_s=seconds,
        backward_s=seconds,
        weight_bytes=sizes,
        activation_bytes=sizes,
        output_bytes=sizes,
    ),
    min_size=1,
    max_size=7,
)
device_lists = st.lists(
    st.builds(
        StageDevice,
        speed=st.sampled_from([0.25, 0.5, 1.0]),
        memory_bytes=st.sampled_from([150, 400, 2**40]),
    ),
    min_size=1,
    max_size=3,
)
limits = st.builds(
    Limits,
    micro_batches=st.integers(1, 4),
    weight_copies=st.sampled_from([1.0, 4.0]),
    link_bytes_per_s=st.sampled_from([10.0, float("inf")]),
    schedule=st.sampled_from(sorted(schedules.SCHEDULES)),
    copy_bytes_per_s=st.sampled_from([10.0, 1e9]),
)


def by_trying(
    units: list[Unit], devices: list[StageDevice], limit: Limits
) -> list[tuple[float, float]]:
    """The slowest stage and the whole step of every cut that fits."""
    found = []
    kept = limit.kept(len(devices))
    for order in itertools.permutations(range(len(devices))):
        for cuts in itertools.combinations(range(1, len(units)), len(devices) - 1):
            edges = [0, *cuts, len(units)]
            stages = []
            for k, device in enumerate(order):
                a, b = edges[k], edges[k + 1]
                memory = stage_memory_bytes(units, a, b, kept[k], limit)
                crossing = 2 * units[a - 1].output_bytes / limit.link_bytes_per_s if a else 0.0
                seconds = sum(u.seconds for u in units[a:b]) / devices[device].speed + crossing
                stages.append(Stage(a, b, device, seconds, memory))
            if all(s.memory_bytes <= devices[s.device].memory_bytes for s in stages):
                slowest = max(s.seconds for s in stages)
                found.append((slowest, step_seconds(units, stages, devices, limit)))
    return found


@given(units_lists, device_lists, limits)
def test_a_step_is_no_longer_than_with_the_fastest_slowest_stage(
    units: list[Unit], devices: list[StageDevice], limit: Limits
) -> None:
    tried = by_trying(units, devices, limit)
    if not tried:
        with pytest.raises(CannotPartition):
            partition(units, devices, limit)
        return
    stages = partition(units, devices, limit)
    took = step_seconds(units, stages, devices, limit)
    slowest = min(s for s, _ in tried)
    assert took <= max(t for s, t in tried if s <= slowest * (1 + 1e-9)) * (1 + 1e-9)
    assert took >= min(t for _, t in tried) * (1 - 1e-9)
    assert [s.start for s in stages] == [0, *[s.stop for s in stages[:-1]]]
    assert stages[-1].stop == len(units)
    assert sorted(s.device for s in stages) == list(range(len(devices)))
    for stage in stages:
        assert stage.stop > stage.start
        assert stage.memory_bytes <= devices[stage.device].memory_bytes


def test_many_units_and_devices_are_quick_enough_to_try() -> None:
    units = [Unit(str(i), 1.0 + i % 3, 2.0) for i in range(64)]
    stages = partition(units, [StageDevice()] * 8, Limits(micro_batches=16))
    total = sum(u.seconds for u in units)
    assert max(s.seconds for s in stages) < total / 8 * 1.2


def test_what_does_not_fit_is_explained() -> None:
    units = [Unit("small", 1, 1, 10), Unit("huge", 1, 1, 2**30)]
    with pytest.raises(CannotPartition, match=r"huge.*4 GiB"):
        partition(units, [StageDevice(1.0, 2**20)] * 2)
    with pytest.raises(CannotPartition, match="fewer than the 3 devices"):
        partition(units, [StageDevice()] * 3)


shareable_lists = st.lists(
    st.builds(
        Unit,
        name=st.just("u"),
        forward_s=seconds,
        backward_s=seconds,
        weight_bytes=sizes,
        activation_bytes=sizes,
        output_bytes=sizes,
        shareable=st.booleans(),
    ),
    min_size=2,
    max_size=8,
)


@given(st.integers(0, 20), st.integers(1, 20))
def test_micro_batches_that_begin_early_are_spread_evenly(count: int, micros: int) -> None:
    count = min(count, micros)
    early = spread(count, micros)
    assert len(early) == count
    assert early <= set(range(micros))
    assert count == 0 or micros - 1 in early
    for upto in range(micros + 1):
        assert abs(len([m for m in early if m < upto]) - upto * count / micros) < 1


@given(shareable_lists, device_lists, limits)
def test_shared_cuts_are_valid_and_shorten_the_step(
    units: list[Unit], devices: list[StageDevice], limit: Limits
) -> None:
    whole_units = [replace(unit, shareable=False) for unit in units]
    try:
        whole = partition(whole_units, devices, limit)
    except CannotPartition:
        with pytest.raises(CannotPartition):
            partition(units, devices, limit)
        return
    stages = partition(units, devices, limit)
    assert all(s.shared == s.shared_micros == 0 for s in whole)
    before = step_seconds(units, whole, devices, limit)
    after = step_seconds(units, stages, devices, limit)
    assert stages == whole or after < before * (1 - SHARING_GAIN_MIN)
    assert [s.start for s in stages] == [0, *[s.stop for s in stages[:-1]]]
    assert stages[-1].stop == len(units)
    cuts = cuts_of(units, stages)
    for k, stage in enumerate(stages):
        cut, after = cuts[k], cuts[k + 1]
        assert cut.at < after.early  # some unit is left for every micro-batch
        assert all(unit.shareable for unit in units[cut.early : cut.at])
        assert (stage.shared > 0) == (stage.shared_micros > 0)
        assert stage.shared_micros < limit.micro_batches
        assert stage.memory_bytes <= devices[stage.device].memory_bytes
    if not schedules.defers(limit.schedule):
        assert stages == whole


@given(shareable_lists, st.integers(2, 6), st.data())
def test_a_shared_cut_moves_work_and_loses_none(
    units: list[Unit], micros: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(1, len(units) - 1))
    shared = data.draw(st.integers(0, at - 1))
    count = data.draw(st.integers(1, micros - 1)) if shared else 0
    limit = Limits(micros, copy_bytes_per_s=float("inf"))
    cuts = [Cut(0), Cut(at, shared, count), Cut(len(units))]
    pairs = enumerate(itertools.pairwise(cuts))
    stages = [make_stage(units, a, b, i, StageDevice(), micros, limit) for i, (a, b) in pairs]
    busy = timing(units, stages, [StageDevice()] * 2, limit).busy_s
    moved = sum(u.seconds for u in units[at - shared : at]) * count
    first = sum(u.seconds for u in units[:at]) * micros
    assert busy[0] == pytest.approx(first - moved)
    assert sum(busy) == pytest.approx(sum(u.seconds for u in units) * micros)
    assert [s.seconds * micros for s in stages] == pytest.approx(busy)
    assert busiest_s(units, stages, [StageDevice()] * 2, limit) == pytest.approx(max(busy))
    # No stage's memory is less than with the cut where it is best for it.
    for stage, (a, b) in zip(stages, ((0, at - shared), (at, len(units))), strict=True):
        assert stage.memory_bytes >= stage_memory_bytes(units, a, b, micros, limit)


def large_unit(weight_bytes: int = 1000, shareable: bool = True) -> list[Unit]:
    """Like convolutions: the unit in the middle is a fifth of all."""
    return [
        Unit("first", 0.004, 0.008, shareable=shareable),
        Unit("middle", 0.002, 0.004, weight_bytes, shareable=shareable),
        Unit("last", 0.004, 0.008, shareable=shareable),
    ]


def test_a_large_unit_in_the_middle_is_shared() -> None:
    limit = Limits(micro_batches=4)
    stages = partition(large_unit(), [StageDevice()] * 2, limit)
    assert [(s.start, s.shared, s.shared_micros) for s in stages] == [(0, 0, 0), (2, 1, 2)]
    assert stages[0].seconds == pytest.approx(stages[1].seconds, rel=1e-3)
    assert step_seconds(large_unit(), stages, [StageDevice()] * 2, limit) < 1.05 * 4 * 0.015


@pytest.mark.parametrize(
    ("units", "limit"),
    [
        (large_unit(shareable=False), Limits(4)),
        (large_unit(weight_bytes=2**30), Limits(4)),  # a quarter of a second to copy
        (large_unit(), Limits(4, schedule="1f1b")),
        (large_unit(), Limits(1)),
    ],
    ids=["buffers", "too large to copy", "bits as one device", "one micro-batch"],
)
def test_what_is_not_shared(units: list[Unit], limit: Limits) -> None:
    assert all(stage.shared == 0 for stage in partition(units, [StageDevice()] * 2, limit))
