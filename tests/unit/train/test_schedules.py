"""Pipeline schedules: complete, free of circles, and within their memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.train.model import schedules
from shoal.train.model.schedules import InvalidSchedule, backward, forward

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


def timing(name: str, stages: int, micros: int) -> schedules.Timing:
    """On equal stages, where a backward pass takes twice as long as a forward."""
    schedule = schedules.make(name, stages, micros)
    return schedules.simulate(schedule, [[1.0] * micros] * stages, [[2.0] * micros] * stages)


@given(counts, counts)
def test_the_bubble_is_the_known_one(stages: int, micros: int) -> None:
    for name in ("1f1b", "gpipe"):
        found = timing(name, stages, micros)
        assert found.total_s == pytest.approx(3.0 * (micros + stages - 1))
        assert found.bubble == pytest.approx((stages - 1) / (micros + stages - 1))


@given(counts, counts)
def test_weights_that_are_put_off_fill_the_bubble(stages: int, micros: int) -> None:
    most = {"zero-bubble": schedules.enough(stages), "zero-bubble-lean": stages}
    before = timing("1f1b", stages, micros)
    for name, kept in most.items():
        schedule = schedules.make(name, stages, micros)
        assert schedules.split(schedule[0]) == frozenset()
        for line in schedule[1:]:
            assert schedules.split(line) == frozenset(range(micros))
        assert all(schedules.in_flight(line) <= min(kept, micros) for line in schedule)
        found = timing(name, stages, micros)
        assert found.total_s <= before.total_s + 1e-9
        assert found.busy_s == pytest.approx(before.busy_s)
    if micros >= 2 * stages:
        lean = timing("zero-bubble-lean", stages, micros)
        assert lean.total_s == pytest.approx(3.0 * micros + stages - 1)


@given(counts, st.integers(0, 8))
def test_with_enough_micro_batches_nobody_waits(stages: int, more: int) -> None:
    found = timing("zero-bubble", stages, schedules.enough(stages) + more)
    assert found.bubble == pytest.approx(0.0, abs=1e-9)


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
    with pytest.raises(InvalidSchedule, match="zero-bubble, zero-bubble-lean, 1f1b, gpipe"):
        schedules.make("2f2b", 1, 1)


def test_transfers_lengthen_the_way() -> None:
    schedule = schedules.gpipe(2, 1)
    each = [[1], [1]]
    assert schedules.simulate(schedule, each, each, transfer_s=0.5).total_s == 5.0
    assert schedules.simulate(schedule, each, each).total_s == 4.0


def test_micro_batches_may_take_unequal_times() -> None:
    schedule = schedules.gpipe(2, 2)
    found = schedules.simulate(schedule, [[1, 3], [3, 1]], [[2, 2], [2, 2]])
    assert found.busy_s == (8.0, 8.0)
    # Forwards 0..1..4 and 1..4..5, backwards 5..7..9 and 7..9..11.
    assert found.total_s == pytest.approx(11.0)
