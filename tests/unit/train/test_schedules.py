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
    for name in ("1f1b", "gpipe"):
        timing = schedules.simulate(
            schedules.make(name, stages, micros), [1.0] * stages, [2.0] * stages
        )
        assert timing.total_s == pytest.approx(3.0 * (micros + stages - 1))
        assert timing.bubble == pytest.approx((stages - 1) / (micros + stages - 1))


@given(counts, counts)
def test_weights_that_are_put_off_fill_the_bubble(stages: int, micros: int) -> None:
    schedule = schedules.make("zero-bubble", stages, micros)
    assert schedules.split(schedule[0]) == frozenset()
    for line in schedule[1:]:
        assert schedules.split(line) == frozenset(range(micros))
    assert all(schedules.in_flight(line) <= min(stages, micros) for line in schedule)
    timing = schedules.simulate(schedule, [1.0] * stages, [2.0] * stages)
    before = schedules.simulate(
        schedules.make("1f1b", stages, micros), [1.0] * stages, [2.0] * stages
    )
    assert timing.total_s <= before.total_s
    assert timing.busy_s == before.busy_s
    if micros >= 2 * stages:
        assert timing.total_s == 3.0 * micros + stages - 1


@given(counts, counts, st.sampled_from(sorted(schedules.SCHEDULES)))
def test_one_thread_can_issue_everything(stages: int, micros: int, name: str) -> None:
    schedule = schedules.make(name, stages, micros)
    issued: list[list[schedules.Instruction]] = [[] for _ in schedule]
    for issue in schedules.issue_order(schedule):
        every = range(stages) if issue.instruction.kind == "forward" else [issue.stage]
        for stage in every:
            issued[stage].append(issue.instruction)
    assert tuple(map(tuple, issued)) == schedule


def test_a_circle_is_found() -> None:
    first = (forward(0), backward(0))
    circle = ((backward(0), forward(0)), first)
    with pytest.raises(InvalidSchedule, match="stage 0 at B0"):
        schedules.check(circle, 1)
    with pytest.raises(InvalidSchedule, match="exactly once"):
        schedules.check(((forward(0),), first), 1)
    early = ((forward(0), schedules.weight(0), backward(0)),)
    with pytest.raises(InvalidSchedule, match="W0 before"):
        schedules.check(early, 1)
    with pytest.raises(InvalidSchedule, match="at least one"):
        schedules.make("1f1b", 0, 1)
    with pytest.raises(InvalidSchedule, match="zero-bubble, 1f1b, gpipe"):
        schedules.make("2f2b", 1, 1)


def test_transfers_lengthen_the_way() -> None:
    schedule = schedules.gpipe(2, 1)
    assert schedules.simulate(schedule, [1, 1], [1, 1], transfer_s=0.5).total_s == 5.0
