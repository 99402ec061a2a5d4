"""Stages by dynamic programming: against trying everything."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.train import schedules
from shoal.train.partition import (
    CannotPartition,
    Limits,
    Stage,
    StageDevice,
    Unit,
    partition,
    stage_memory_bytes,
    step_seconds,
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
    with pytest.raises(CannotPartition, match=r"huge.*4096 MiB"):
        partition(units, [StageDevice(1.0, 2**20)] * 2)
    with pytest.raises(CannotPartition, match="fewer than the 3 devices"):
        partition(units, [StageDevice()] * 3)
