"""The vocabulary of ends, and which of two reasons is nearer to the cause."""

from __future__ import annotations

import signal

import pytest

from shoal.pool.base import limits
from shoal.pool.wire import end_reasons
from shoal.pool.wire.end_reasons import End, Note, RecentEnds, Why

GIVEN_BACK, CLOSED, CRASHED = (
    End(Why.GIVEN_BACK),
    End(Why.CLIENT_CLOSED),
    End(Why.WORKER_CRASHED, "SIGSEGV"),
)
ENDED, ORDERED = End(Why.CLIENT_ENDED), End(Why.ORDERED)


def note(end: End) -> Note:
    return Note(0.0, "head", "end", "lease 1", end)


def recent(end: End, *parts: tuple[int, int]) -> tuple[RecentEnds, Note]:
    made, told = RecentEnds(), note(end)
    made.add(1, 1, "ana", "hash", 10.0, parts or ((0, 5),), told)
    return made, told


@pytest.mark.parametrize("why", Why)
def test_every_end_has_a_text(why: Why) -> None:
    text = End(why, "a detail").text
    assert text
    assert "{" not in text
    assert not text.endswith(".")
    assert "above" not in text  # it may be read on another machine


def test_signals_are_named() -> None:
    assert end_reasons.of_signal(signal.SIGKILL) == End(Why.WORKER_KILLED, "SIGKILL")
    assert end_reasons.of_signal(signal.SIGSEGV) == CRASHED
    assert end_reasons.of_signal(62).text == "the worker process was killed by signal 62"


@pytest.mark.parametrize(
    ("first", "later", "final"),
    [
        (CLOSED, GIVEN_BACK, GIVEN_BACK),
        (CLOSED, ENDED, ENDED),
        (GIVEN_BACK, CRASHED, CRASHED),
        (GIVEN_BACK, ORDERED, GIVEN_BACK),
        (GIVEN_BACK, ENDED, GIVEN_BACK),
        (CRASHED, GIVEN_BACK, CRASHED),
        (CRASHED, CLOSED, CRASHED),
    ],
)
def test_the_reason_nearest_to_the_cause_stays(first: End, later: End, final: End) -> None:
    made, told = recent(first)
    changed = made.correct(1, later, 11.0)
    assert told.end == final
    assert changed == ([told] if first != final else [])
    ended = made.of(1)
    assert ended is not None
    assert ended.parts == {(0, 5): final}


def test_a_reason_of_one_part_changes_no_other() -> None:
    made, first = recent(CLOSED, (0, 5))
    second = note(CLOSED)
    made.add(1, 1, "ana", "hash", 10.5, [(1, 5)], second)
    assert made.correct(1, CRASHED, 11.0, (1, 5)) == [second]
    assert (first.end, second.end) == (CLOSED, CRASHED)


def test_a_reason_that_comes_too_late_changes_nothing() -> None:
    made, told = recent(CLOSED)
    assert not made.correct(1, CRASHED, 10.0 + limits.END_CORRECT_S + 1)
    assert not made.correct(2, CRASHED, 10.0)
    assert told.end == CLOSED
    made.forget_old(10.0 + limits.END_KEEP_S + 1)
    assert made.of(1) is None


def test_the_number_of_remembered_leases_is_bounded() -> None:
    made = RecentEnds()
    for lease in range(limits.ENDS_KEPT_MAX + 10):
        made.add(lease, lease, "ana", "hash", 0.0, [(0, 1)], note(CLOSED))
    assert made.of(9) is None
    assert made.of(10) is not None
