"""The offline pager: what has to be moved at least."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.memory import Segment
from shoal.memory.replay import replay
from shoal.memory.trace import FREES, MAKES, READS, WRITES, Event, Trace


def calls(*groups: list[tuple[int, int]], size: int = 10) -> list[Event]:
    """Events of one call per group; an event is (kind, address)."""
    return [
        Event(number, kind, address, size, 0)
        for number, group in enumerate(groups, 1)
        for kind, address in group
    ]


def test_what_fits_moves_nothing() -> None:
    trace = calls([(MAKES, 1)], [(MAKES, 2)], [(READS, 1), (READS, 2)])
    assert replay(trace, 20).moved_bytes == 0


def test_a_loop_over_more_than_fits() -> None:
    """Least-recently-used refetches everything; knowing the future keeps most."""
    loop = [[(READS, i)] for _ in range(5) for i in range(4)]
    lru = replay(calls(*loop), 30, "lru")
    best = replay(calls(*loop), 30)
    assert lru.in_bytes == 5 * 4 * 10
    assert best.in_bytes == 4 * 10 + 10 * 5
    assert best.out_bytes == lru.out_bytes == 0  # nothing was written


def test_what_was_written_has_to_be_written_back() -> None:
    trace = calls([(MAKES, 1)], [(MAKES, 2)], [(READS, 1)], [(READS, 2)])
    result = replay(trace, 10)
    assert (result.out_bytes, result.in_bytes) == (20, 20)


def test_the_dead_are_not_written_back() -> None:
    trace = calls([(MAKES, 1)], [(FREES, 1)], [(MAKES, 2)])
    assert replay(trace, 10).moved_bytes == 0


def test_what_will_be_freed_need_not_be_written_by_who_knows() -> None:
    """It is not freed yet when it leaves: a pager without that knowledge has to write it."""
    trace = calls([(MAKES, 1)], [(MAKES, 2)], [(READS, 2)], [(FREES, 1)])
    result = replay(trace, 10)
    assert (result.moved_bytes, result.dead_bytes) == (0, 10)
    assert replay(trace, 10, "lru").out_bytes == 10


def test_it_begins_with_what_the_device_held() -> None:
    """A segment that is there costs nothing, one that is swapped out does; neither is written."""
    before = [Segment(1, 10, 1, (1,), (), 0), Segment(2, 10, 1, (1,), (1,), 0)]
    reads = calls([(READS, 1)], [(READS, 2)], [(READS, 1)])
    assert replay(Trace(reads, before), 20).in_bytes == 10
    assert replay(Trace(reads, before), 10).in_bytes == 20
    assert replay(Trace(reads, before), 10).out_bytes == 0
    assert replay(Trace(reads, before), 20).peak_bytes == 20


def test_each_device_has_its_own_part_of_a_trace() -> None:
    """A copy from the other device is not swapped in, and is void once its original is written."""
    trace = Trace(
        [
            Event(1, MAKES, 1, 10, 0),
            Event(2, READS, 1, 10, 1),
            Event(3, WRITES, 1, 10, 0),
            Event(4, MAKES, 2, 10, 1),
            Event(5, READS, 2, 10, 1),
        ]
    )
    assert replay(trace.of_member(0), 10).moved_bytes == 0
    assert replay(trace.of_member(1), 10).moved_bytes == 0
    assert [e.kind for e in trace.of_member(1).events if e.address == 1][-1] == FREES


def test_an_address_that_is_used_again_is_another_segment() -> None:
    trace = calls([(MAKES, 1)], [(FREES, 1)], [(MAKES, 1)], [(WRITES, 1)])
    assert replay(trace, 10).moved_bytes == 0


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="optimal"):
        replay([], 10, "magic")


@given(
    uses=st.lists(st.integers(0, 6), min_size=1, max_size=60),
    capacity=st.integers(1, 7),
)
def test_the_optimum_is_never_beaten(uses: list[int], capacity: int) -> None:
    """For reads of equal size Belady's rule is optimal, so it fetches no more than LRU does."""
    trace = calls(*[[(READS, use)] for use in uses])
    best = replay(trace, 10 * capacity)
    assert best.in_bytes <= replay(trace, 10 * capacity, "lru").in_bytes
    assert best.in_bytes >= 10 * len(set(uses))
    assert replay(trace, 10 * capacity + 10).in_bytes <= best.in_bytes


@given(
    uses=st.lists(st.integers(0, 6), min_size=1, max_size=60),
    capacity=st.integers(1, 7),
)
def test_the_workers_policy_is_optimal_if_it_sees_everything(
    uses: list[int], capacity: int
) -> None:
    """With the whole trace in its window, and nothing to write, only Belady's rule is left."""
    reads = [*[[(READS, use)] for use in uses], *[[(FREES, use)] for use in set(uses)]]
    ours = replay(calls(*reads), 10 * capacity, "shoal", ahead_calls=100)
    assert ours.in_bytes == replay(calls(*reads), 10 * capacity).in_bytes


@given(
    uses=st.lists(st.integers(0, 6), min_size=1, max_size=60),
    capacity=st.integers(1, 7),
)
def test_lru_is_lru(uses: list[int], capacity: int) -> None:
    kept: list[int] = []  # least recent first
    fetched = 0
    for use in uses:
        fetched += use not in kept
        kept = [*[other for other in kept if other != use], use][-capacity:]
    trace = calls(*[[(READS, use)] for use in uses])
    assert replay(trace, 10 * capacity, "lru").in_bytes == 10 * fetched


def test_the_workers_policy_learns_a_loop() -> None:
    """It sees one call ahead, and still keeps most of a loop that LRU fetches whole every time."""
    loop = calls(*[[(READS, i)] for _ in range(50) for i in range(10)])
    optimal, ours, lru = (replay(loop, 80, p, 2).in_bytes for p in ("optimal", "shoal", "lru"))
    assert optimal <= ours < 2 * optimal < lru
