"""The offline pager: what has to be moved at least."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.memory.replay import replay
from shoal.memory.trace import FREES, MAKES, READS, WRITES, Event


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
