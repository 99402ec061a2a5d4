"""Events of a step: the first error wins before the commit, and the commit wins after it."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.train.group.errors import TrainError
from shoal.train.group.step_events import Aborted, Decision, Event, StepEvents

LONG_S = 60.0
DECISIONS = st.sampled_from([Decision.UPDATE, Decision.SKIP])


@given(st.lists(st.one_of(DECISIONS, st.integers(0, 3), st.none()), max_size=8))
def test_a_step_either_counts_or_fails(actions: list[Decision | int | None]) -> None:
    events = StepEvents(4)
    outcome: Decision | int | str | None = "open"
    for action in actions:
        if isinstance(action, Decision):
            counts = events.commit(action)
            assert counts == (events.failure is None)
            outcome = action if counts else outcome
        else:
            events.fail(action, KeyError(str(action)))
            if outcome == "open":
                outcome = action
        assert events.failure is None or events.decision is None
    if outcome == "open":
        assert (events.failure, events.decision) == (None, None)
    elif isinstance(outcome, Decision):
        assert events.wait_decision(LONG_S) is outcome
        events.check()
    else:
        assert events.failure is not None
        assert events.failure.group == outcome
        with pytest.raises(Aborted):
            events.check()


def test_an_event_wakes_the_threads_that_wait_for_it_and_no_others() -> None:
    events, woken = StepEvents(2), [threading.Event(), threading.Event()]

    def wait(slot: int) -> None:
        events.wait(Event.READY, "a group", LONG_S, slot)
        woken[slot].set()

    threads = [threading.Thread(target=wait, args=(slot,)) for slot in range(2)]
    for thread in threads:
        thread.start()
    events.set(Event.READY, 1)
    assert woken[1].wait(LONG_S)
    assert not woken[0].is_set()
    events.set(Event.READY, 0)
    for thread in threads:
        thread.join(LONG_S)
    assert woken[0].is_set()


def test_a_failure_ends_every_wait() -> None:
    events, ended = StepEvents(1), []

    def wait(event: Event) -> None:
        with pytest.raises(Aborted):
            events.wait(event, "never", LONG_S)
        ended.append(event)

    threads = [threading.Thread(target=wait, args=(event,)) for event in Event]
    for thread in threads:
        thread.start()
    events.fail(0, KeyError("oops"))
    for thread in threads:
        thread.join(LONG_S)
    assert set(ended) == set(Event)


def test_an_aborted_thread_is_not_the_cause() -> None:
    events = StepEvents(1)
    events.fail(0, Aborted())
    assert events.failure is None


def test_a_wait_that_takes_too_long_names_what_it_waits_for() -> None:
    with pytest.raises(TrainError, match=r"waited 0\.01 s for the batch"):
        StepEvents(1).wait(Event.SUMMED, "the batch", 0.01)
