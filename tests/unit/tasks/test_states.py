"""What becomes of a task, against a model of runners that crash and messages that come late."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.tasks import states
from shoal.tasks.states import ACTIVE, FINAL, State, Step, Stopping, Task, step


def waiting(**changes: object) -> Task:
    return dataclasses.replace(Task(7, State.WAITING, submitted_at=1.0), **changes)


def running(**changes: object) -> Task:
    task = step(waiting(), states.Planned("r"), 2.0).task
    task = step(task, states.Started(1), 3.0).task
    return dataclasses.replace(task, **changes)


def test_a_task_that_runs_and_succeeds() -> None:
    planned = step(waiting(), states.Planned("r"), 2.0)
    assert (planned.task.state, planned.task.attempt) == (State.STARTING, 1)
    assert planned.steps == (Step.START,)
    started = step(planned.task, states.Started(1), 3.0).task
    assert (started.state, started.started_at) == (State.RUNNING, 3.0)
    ended = step(started, states.Exited(1, 0), 9.0)
    assert (ended.task.state, ended.task.exit_code, ended.task.ended_at) == (
        State.SUCCEEDED,
        0,
        9.0,
    )
    assert ended.steps == (Step.FREE, Step.END)


@pytest.mark.parametrize(
    ("task", "event", "state", "code"),
    [
        (running(), states.Exited(1, 3), State.FAILED, 3),
        (running(), states.Exited(1, 137), State.FAILED, 137),
        (running(), states.Exited(1, 75), State.FAILED, 75),  # nobody asked it to yield
        (running(retry_exits_left=1), states.Exited(1, 3), State.WAITING, 3),
        (running(device_lost=True), states.Exited(1, 1), State.WAITING, 1),
        (running(device_lost=True), states.Exited(1, 0), State.SUCCEEDED, 0),
        (running(device_lost=True, retries_left=0), states.Exited(1, 1), State.LOST, 1),
        (running(), states.Exited(1, 143, over_limit=True), State.FAILED, 143),
        (running(), states.Exited(1, None, problem="no folder"), State.FAILED, None),
        (running(), states.AttemptLost(1, "runner"), State.WAITING, None),
        (running(retries_left=0), states.AttemptLost(1, "runner"), State.LOST, None),
        (running(stopping=Stopping.YIELD), states.Exited(1, 75), State.WAITING, 75),
        (running(stopping=Stopping.YIELD), states.Exited(1, 143), State.WAITING, 143),
        (running(stopping=Stopping.YIELD), states.Exited(1, 2), State.FAILED, 2),
        (running(stopping=Stopping.CANCEL), states.Exited(1, 0), State.CANCELLED, 0),
        (running(stopping=Stopping.CANCEL), states.AttemptLost(1, "x"), State.CANCELLED, None),
    ],
)
def test_how_an_attempt_ends(task: Task, event: states.Event, state: State, code: object) -> None:
    ended = step(task, event, 9.0).task
    assert (ended.state, ended.exit_code) == (state, code)


def test_a_yield_costs_no_retry_and_a_loss_costs_one() -> None:
    yielded = step(running(stopping=Stopping.YIELD), states.Exited(1, 75), 9.0).task
    lost = step(running(), states.AttemptLost(1, "runner"), 9.0).task
    assert (yielded.retries_left, lost.retries_left) == (3, 2)


def test_cancel_waits_for_the_runner_and_never_weakens() -> None:
    asked = step(running(), states.Cancel("ana"), 5.0)
    assert (asked.task.state, asked.steps) == (State.RUNNING, (Step.STOP,))
    assert step(asked.task, states.AskYield(), 6.0).task.cancelling
    ended = step(asked.task, states.Exited(1, 143), 7.0).task
    assert (ended.state, ended.end_reason) == (State.CANCELLED, "cancelled: by ana")
    assert step(ended, states.Cancel("ben"), 8.0).task == ended


def test_a_late_start_is_stopped_before_the_next_one() -> None:
    planned = step(waiting(), states.Planned("r"), 2.0).task
    late = step(planned, states.Late(1), 70.0)
    assert (late.task.state, late.steps) == (State.STARTING, (Step.STOP,))
    again = step(late.task, states.Exited(1, None), 71.0).task
    assert (again.state, again.retries_left) == (State.WAITING, 2)


def test_dependencies() -> None:
    task = waiting(after=frozenset({1, 2}))
    assert step(task, states.Planned("r"), 2.0).task == task
    task = step(task, states.EarlierEnded(1, "a-1", State.SUCCEEDED), 3.0).task
    assert not task.ready
    assert step(task, states.EarlierEnded(2, "b-2", State.SUCCEEDED), 4.0).task.ready
    ended = step(task, states.EarlierEnded(2, "b-2", State.FAILED), 4.0).task
    assert ended.state is State.CANCELLED
    assert "b-2" in ended.end_reason


def test_until_is_the_time_to_have_started_by() -> None:
    assert step(waiting(), states.UntilPassed(), 5.0).task.state is State.EXPIRED
    once = step(running(), states.AttemptLost(1, "runner"), 5.0).task
    assert step(once, states.UntilPassed(), 6.0).task.state is State.WAITING


def test_hold_and_release() -> None:
    held = step(waiting(), states.Hold(), 2.0).task
    assert held.state is State.HELD
    assert step(held, states.Planned("r"), 3.0).task == held
    assert step(held, states.Release(), 3.0).task.state is State.WAITING
    with pytest.raises(states.NotNow, match="shoal cancel"):
        step(running(), states.Hold(), 3.0)


def test_codes_of_wait() -> None:
    for state, exit_code, code in [
        (State.SUCCEEDED, 0, 0), (State.FAILED, 3, 3), (State.FAILED, 143, 143),
        (State.FAILED, None, 125), (State.CANCELLED, 143, 130), (State.CANCELLED, None, 130),
        (State.EXPIRED, None, 125), (State.LOST, 1, 125),
    ]:  # fmt: skip
        assert states.wait_code(state, exit_code) == code


class World(RuleBasedStateMachine):
    """A task, a runner that may crash, and two queues of messages between them.

    The runner reports again what the head has not acknowledged, so messages come twice and late. The
    head may crash between writing a task and sending its steps; then it sends them again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.task = Task(1, State.WAITING, 0.0, retries_left=2, retry_exits_left=1)
        self.alive: set[int] = set()  # attempts whose processes exist
        self.taken: set[int] = set()  # attempts that runners have ever started
        self.reports: list[states.Event] = []
        self.orders: list[tuple[Step, int]] = []
        self.asked_to_yield = False
        self.ends = 0

    def feed(self, event: states.Event) -> None:
        self.now += 1
        before = self.task
        outcome = step(before, event, self.now)
        self.task = outcome.task
        if before.state in FINAL:
            assert outcome.task == before
            assert not outcome.steps
        assert outcome.task.attempt in (before.attempt, before.attempt + 1)
        assert outcome.task.retries_left <= before.retries_left
        for one in outcome.steps:
            if one is Step.START:
                assert not self.alive, "two attempts at once"
            if one in (Step.START, Step.STOP):
                self.orders.append((one, outcome.task.attempt))
            if one is Step.END:
                self.ends += 1
                assert outcome.task.state in FINAL
        freed = before.state in ACTIVE and outcome.task.state not in ACTIVE
        assert freed == (Step.FREE in outcome.steps)

    @rule()
    def plan(self) -> None:
        self.feed(states.Planned("r"))

    @rule(event=st.sampled_from([states.Cancel("a"), states.UntilPassed()]))
    def wish(self, event: states.Event) -> None:
        self.feed(event)

    @precondition(lambda self: self.task.state in (State.WAITING, State.HELD))
    @rule(event=st.sampled_from([states.Hold(), states.Release()]))
    def hold(self, event: states.Event) -> None:
        self.feed(event)

    @rule()
    def ask_to_yield(self) -> None:
        self.asked_to_yield = True
        self.feed(states.AskYield())

    @rule(kind=st.sampled_from([states.Late, states.DeviceLost, states.Suspended, states.Resumed]))
    def of_head(self, kind: type) -> None:
        self.feed(kind(self.task.attempt))

    @precondition(lambda self: self.orders)
    @rule(data=st.data())
    def runner_hears(self, data: st.DataObject) -> None:
        order, attempt = self.orders.pop(0)
        if order is Step.START:
            if attempt == self.task.attempt and attempt not in self.taken:
                assert not self.alive
                self.alive.add(attempt)
                self.taken.add(attempt)
                self.reports.append(states.Started(attempt))
        elif attempt in self.alive:
            self.end(attempt, data.draw(st.sampled_from([0, 75, 143])))

    @precondition(lambda self: self.alive)
    @rule(code=st.sampled_from([0, 1, 75, 137]), limit=st.booleans())
    def program_ends(self, code: int, limit: bool) -> None:
        self.end(next(iter(self.alive)), code, limit)

    def end(self, attempt: int, code: int, limit: bool = False) -> None:
        self.alive.discard(attempt)
        self.reports.append(states.Exited(attempt, code, limit))

    @precondition(lambda self: self.reports)
    @rule(index=st.integers(0, 5), again=st.booleans())
    def head_hears(self, index: int, again: bool) -> None:
        at = index % len(self.reports)
        event = self.reports[at]
        if not again:
            del self.reports[at]
        self.feed(event)

    @rule()
    def runner_crashes(self) -> None:
        """Nothing survives a runner; the next one says that it has nothing. Orders are gone."""
        self.alive.clear()
        self.orders.clear()
        self.reports = [r for r in self.reports if isinstance(r, states.Exited)]
        if self.task.state in ACTIVE and not self.reports:
            self.feed(states.AttemptLost(self.task.attempt, "its runner ended"))

    @rule()
    def head_crashes(self) -> None:
        """Orders are lost. The next head asks the runner what it has, and repeats them."""
        self.orders.clear()
        if self.task.state not in ACTIVE:
            return
        if self.task.attempt not in self.taken:
            self.orders.append((Step.START, self.task.attempt))
        if self.task.stopping:
            self.orders.append((Step.STOP, self.task.attempt))

    @invariant()
    def at_most_one_attempt(self) -> None:
        assert len(self.alive) <= 1
        if self.alive:
            assert self.task.attempt in self.alive
            assert self.task.state in ACTIVE

    @invariant()
    def it_ends_once(self) -> None:
        assert self.ends == (self.task.state in FINAL)
        assert (self.task.ended_at is not None) == (self.task.state in FINAL)
        assert bool(self.task.end_reason) >= (self.task.state in FINAL)

    @invariant()
    def budgets_hold(self) -> None:
        assert self.task.retries_left >= 0
        assert self.task.retry_exits_left >= 0


World.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestWorld = World.TestCase
