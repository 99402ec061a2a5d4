"""Pipeline schedules: complete, free of circles, and within their memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.train import schedules
from shoal.train.schedules import InvalidSchedule, backward, forward

counts = st.integers(1, 8)


@given(counts, counts, st.sampled_from(sorted(schedules.SCHEDULES)))
def test_schedules_are_valid(stages: int, micros: int, name: str) -> None:
    schedule = schedules.make(name, stages, micros)  # checks
    assert len(schedule) == stages
    for line in schedule:
        for m in range(micros):
            assert line.index(forward(m)) < line.index(backward(m))


@given(counts, counts)
def test_memory_of_1f1b_is_bounded_by_the_stages(stages: int, micros: int) -> None:
    schedule = schedules.one_forward_one_backward(stages, micros)
    for stage, line in enumerate(schedule):
        assert schedules.in_flight(line) == min(stages - stage, micros)
    assert schedules.in_flight(schedules.gpipe(stages, micros)[0]) == micros


@given(counts, counts)
def test_the_bubble_is_the_known_one(stages: int, micros: int) -> None:
    for name in schedules.SCHEDULES:
        timing = schedules.simulate(
            schedules.make(name, stages, micros), [1.0] * stages, [2.0] * stages
        )
        assert timing.total_s == pytest.approx(3.0 * (micros + stages - 1))
        assert timing.bubble == pytest.approx((stages - 1) / (micros + stages - 1))


def test_a_circle_is_found() -> None:
    first = (forward(0), backward(0))
    circle = ((backward(0), forward(0)), first)
    with pytest.raises(InvalidSchedule, match="stage 0 at B0"):
        schedules.check(circle, 1)
    with pytest.raises(InvalidSchedule, match="exactly once"):
        schedules.check(((forward(0),), first), 1)
    with pytest.raises(InvalidSchedule, match="at least one"):
        schedules.make("1f1b", 0, 1)
    with pytest.raises(InvalidSchedule, match="1f1b, gpipe"):
        schedules.make("2f2b", 1, 1)


def test_transfers_lengthen_the_way() -> None:
    schedule = schedules.gpipe(2, 1)
    assert schedules.simulate(schedule, [1, 1], [1, 1], transfer_s=0.5).total_s == 5.0
