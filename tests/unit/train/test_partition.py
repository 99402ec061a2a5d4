"""Stages by dynamic programming: against trying everything."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.train.partition import (
    CannotPartition,
    Limits,
    StageDevice,
    Unit,
    partition,
    stage_memory_bytes,
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
)


def slowest_by_trying(units: list[Unit], devices: list[StageDevice], limit: Limits) -> float | None:
    best = None
    for order in itertools.permutations(devices):
        for cuts in itertools.combinations(range(1, len(units)), len(devices) - 1):
            edges = [0, *cuts, len(units)]
            times = []
            for k, device in enumerate(order):
                a, b = edges[k], edges[k + 1]
                if stage_memory_bytes(units, a, b, len(order) - k, limit) > device.memory_bytes:
                    break
                crossing = 2 * units[a - 1].output_bytes / limit.link_bytes_per_s if a else 0.0
                times.append(sum(u.seconds for u in units[a:b]) / device.speed + crossing)
            else:
                best = max(times) if best is None else min(best, max(times))
    return best


@given(units_lists, device_lists, limits)
def test_no_cut_is_better(units: list[Unit], devices: list[StageDevice], limit: Limits) -> None:
    expected = slowest_by_trying(units, devices, limit)
    if expected is None:
        with pytest.raises(CannotPartition):
            partition(units, devices, limit)
        return
    stages = partition(units, devices, limit)
    assert max(s.seconds for s in stages) == pytest.approx(expected)
    assert [s.start for s in stages] == [0, *[s.stop for s in stages[:-1]]]
    assert stages[-1].stop == len(units)
    assert sorted(s.device for s in stages) == list(range(len(devices)))
    for stage in stages:
        assert stage.stop > stage.start
        assert stage.memory_bytes <= devices[stage.device].memory_bytes


def test_many_units_and_devices_are_quick_enough_to_try() -> None:
    units = [Unit(str(i), 1.0 + i % 3, 2.0) for i in range(64)]
    stages = partition(units, [StageDevice()] * 8)
    total = sum(u.seconds for u in units)
    assert max(s.seconds for s in stages) < total / 8 * 1.2


def test_what_does_not_fit_is_explained() -> None:
    units = [Unit("small", 1, 1, 10), Unit("huge", 1, 1, 2**30)]
    with pytest.raises(CannotPartition, match=r"huge.*4096 MiB"):
        partition(units, [StageDevice(1.0, 2**20)] * 2)
    with pytest.raises(CannotPartition, match="fewer than the 3 devices"):
        partition(units, [StageDevice()] * 3)
