"""What becomes of a task: a pure state machine. Events in, a new task and steps out; no clock.

An *attempt* is one run of the task's program. Its number fences: an event of another attempt than the
current one changes nothing. A task has at most one attempt at a time, and the next one starts only
after a runner has said that nothing of the last one is left, or is known to have ended with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

EXIT_YIELDED = 75  # a program's exit code: "I saved my work; go on with it later"
EXIT_CANCELLED = 130
EXIT_SHOAL = 125  # lost, expired, or a failure of Shoal's own
EXIT_TIMEOUT = 124
EXIT_SIGNAL = 128  # and the signal's number


class State(StrEnum):
    HELD = "held"  # until its owner releases it
    WAITING = "waiting"
    STARTING = "starting"  # its devices are reserved; a runner starts the program
    RUNNING = "running"
    SUSPENDED = "suspended"  # its memory is on the host and its calls wait
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # it had not started by --until
    LOST = "lost"  # the pool lost it more often than --retries allows


FINAL = frozenset(
    {State.SUCCEEDED, State.FAILED, State.CANCELLED, State.EXPIRED, State.LOST}
)  # fmt: skip
ACTIVE = frozenset({State.STARTING, State.RUNNING, State.SUSPENDED})  # it has an attempt


class Stopping(StrEnum):
    """Why the pool has asked the runner to end the current attempt. A later one never weakens it."""

    NO = ""
    YIELD = "yield"  # others go first; the program may save its work
    LATE = "late"  # it did not start in time
    LIMIT = "limit"
    CANCEL = "cancel"


_STRENGTH = list(Stopping)


@dataclass(frozen=True, slots=True)
class Task:
    """What decides about a task. `number` orders tasks by submission."""

    number: int
    state: State
    submitted_at: float
    retries_left: int = 3  # lost devices, nodes and runners
    retry_exits_left: int = 0  # exits with another code than 0
    until_at: float | None = None
    after: frozenset[int] = frozenset()  # tasks that must succeed first
    attempt: int = 0  # the number of the current or last one
    runner: str = ""  # that has it
    stopping: Stopping = Stopping.NO
    device_lost: bool = False  # by the current attempt
    started_at: float | None = None  # of the first attempt
    attempt_at: float | None = None  # of the current attempt: planned, then started
    ended_at: float | None = None
    exit_code: int | None = None  # of the last attempt; 128 + n for signal n
    end_reason: str = ""  # "CODE: text"

    @property
    def ready(self) -> bool:
        """Whether it waits for nothing but devices and a runner."""
        return self.state is State.WAITING and not self.after

    @property
    def cancelling(self) -> bool:
        return self.stopping is Stopping.CANCEL


# --- events ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hold:
    """Its owner wants it to wait."""


@dataclass(frozen=True, slots=True)
class Release:
    """Its owner lets it go on."""


@dataclass(frozen=True, slots=True)
class Cancel:
    by: str


@dataclass(frozen=True, slots=True)
class Planned:
    """It has devices and a runner."""

    runner: str


@dataclass(frozen=True, slots=True)
class Started:
    """Its program runs."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Exited:
    """Nothing of the attempt is left. `code` is None if the program never ran."""

    attempt: int
    code: int | None
    over_limit: bool = False
    problem: str = ""  # why it could not be started
    over: str = ""  # what it used too much of


@dataclass(frozen=True, slots=True)
class AttemptLost:
    """The attempt ended with its runner or node, or never reached it."""

    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class NotSent:
    """No runner has heard of the attempt: it is as if it had not been planned."""

    attempt: int


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """The attempt has lost a device. Its program may survive that."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Late:
    """The attempt has not started in time."""

    attempt: int


@dataclass(frozen=True, slots=True)
class AskYield:
    """Others go first: the program should save its work and exit with code 75."""


@dataclass(frozen=True, slots=True)
class Suspended:
    attempt: int


@dataclass(frozen=True, slots=True)
class Resumed:
    attempt: int


@dataclass(frozen=True, slots=True)
class UntilPassed:
    """The time has come by which it had to start."""


@dataclass(frozen=True, slots=True)
class EarlierEnded:
    """A task that it waits for has ended."""

    number: int
    name: str
    state: State


Event = (
    Hold | Release | Cancel | Planned | Started | Exited | AttemptLost | NotSent | DeviceLost
    | Late | AskYield | Suspended | Resumed | UntilPassed | EarlierEnded
)  # fmt: skip


# --- steps -----------------------------------------------------------------------------------------


class Step(StrEnum):
    """What the shell does after it has written the new task, in this order."""

    START = "start"  # send the attempt to the runner
    STOP = "stop"  # tell the runner to end the attempt: SIGTERM, then SIGKILL
    FREE = "free"  # give back the attempt's devices
    END = "end"  # tell those who wait for its end


class NotNow(Exception):
    """The owner's wish does not fit the task's state; the text says why and what to type."""


@dataclass(frozen=True, slots=True)
class Outcome:
    task: Task
    steps: tuple[Step, ...] = ()


def step(task: Task, event: Event, now: float) -> Outcome:
    """Return the task after `event`. What comes late, twice or for another attempt changes nothing.

    >>> task = Task(1, State.WAITING, submitted_at=0.0)
    >>> outcome = step(task, Planned("owner@lab"), 1.0)
    >>> outcome.task.state, outcome.steps
    (<State.STARTING: 'starting'>, (<Step.START: 'start'>,))
    """
    match event:
        case Hold():
            return _hold(task)
        case Release():
            return _release(task)
        case Cancel(by):
            return _cancel(task, by, now)
        case Planned(runner):
            return _planned(task, runner, now)
        case UntilPassed():
            return _until_passed(task, now)
        case EarlierEnded(number, name, state):
            return _earlier_ended(task, number, name, state, now)
        case AskYield():
            if task.state is State.RUNNING:
                return _stop(task, Stopping.YIELD)
            return Outcome(task)
        case _:
            if task.state not in ACTIVE or event.attempt != task.attempt:
                return Outcome(task)
            return _of_attempt(task, event, now)


def _of_attempt(
    task: Task,
    event: Started | Exited | AttemptLost | NotSent | DeviceLost | Late | Suspended | Resumed,
    now: float,
) -> Outcome:
    match event:
        case Started():
            if task.state is not State.STARTING:
                return Outcome(task)
            first = task.started_at if task.started_at is not None else now
            return Outcome(
                replace(task, state=State.RUNNING, started_at=first, attempt_at=now)
            )  # fmt: skip
        case Exited():
            return _exited(task, event, now)
        case AttemptLost(_, why):
            return _lost(task, why, now)
        case NotSent():
            if task.cancelling:
                return _end(task, State.CANCELLED, task.end_reason, now)
            return _again(task) if task.state is State.STARTING else Outcome(task)
        case DeviceLost():
            return Outcome(replace(task, device_lost=True))
        case Late():
            if task.state is State.STARTING:
                return _stop(task, Stopping.LATE)
            return Outcome(task)
        case Suspended():
            if task.state is State.RUNNING:
                return Outcome(replace(task, state=State.SUSPENDED))
            return Outcome(task)
        case Resumed():
            if task.state is State.SUSPENDED:
                return Outcome(replace(task, state=State.RUNNING))
            return Outcome(task)


# --- the owner's wishes ----------------------------------------------------------------------------


def _hold(task: Task) -> Outcome:
    if task.state in (State.WAITING, State.HELD):
        return Outcome(replace(task, state=State.HELD))
    if task.state in FINAL:
        raise NotNow(f"it has ended: {task.state}")
    raise NotNow(f"it is {task.state}; only a waiting task can be held. End it with: shoal cancel")


def _release(task: Task) -> Outcome:
    if task.state is State.HELD:
        return Outcome(replace(task, state=State.WAITING))
    if task.state in FINAL:
        raise NotNow(f"it has ended: {task.state}")
    return Outcome(task)


def _cancel(task: Task, by: str, now: float) -> Outcome:
    """Cancel, however often: the end of a task that has ended already is not changed."""
    if task.state in FINAL:
        return Outcome(task)
    if task.state in ACTIVE:
        return _stop(replace(task, end_reason=f"cancelled: by {by}"), Stopping.CANCEL)
    return _end(task, State.CANCELLED, f"cancelled: by {by}", now)


# --- before an attempt -----------------------------------------------------------------------------


def _planned(task: Task, runner: str, now: float) -> Outcome:
    if not task.ready:
        return Outcome(task)
    made = replace(
        task, state=State.STARTING, attempt=task.attempt + 1, runner=runner, attempt_at=now,
        stopping=Stopping.NO, device_lost=False, exit_code=None, end_reason="",
    )  # fmt: skip
    return Outcome(made, (Step.START,))


def _until_passed(task: Task, now: float) -> Outcome:
    """Expire, unless it has started once: `--until` is the time to have started by."""
    waits = task.state in (State.WAITING, State.HELD)
    if not waits or task.started_at is not None:
        return Outcome(task)
    return _end(task, State.EXPIRED, "until: it had not started by its --until", now)


def _earlier_ended(task: Task, number: int, name: str, state: State, now: float) -> Outcome:
    if task.state not in (State.WAITING, State.HELD) or number not in task.after:
        return Outcome(task)
    if state is State.SUCCEEDED:
        return Outcome(replace(task, after=task.after - {number}))
    text = f"after: {name}, which it was to follow, ended as {state}"
    return _end(task, State.CANCELLED, text, now)


# --- the end of an attempt -------------------------------------------------------------------------


def _stop(task: Task, why: Stopping) -> Outcome:
    """Ask the runner to end the attempt. It has ended only when the runner says so."""
    if _STRENGTH.index(why) < _STRENGTH.index(task.stopping):
        return Outcome(task)
    return Outcome(replace(task, stopping=why), (Step.STOP,))


def _exited(task: Task, event: Exited, now: float) -> Outcome:
    task = replace(task, exit_code=event.code)
    if task.cancelling:
        return _end(task, State.CANCELLED, task.end_reason, now)
    if event.over_limit:
        return _end(task, State.FAILED, "limit: it ran longer than its --limit", now)
    if event.over:
        return _end(task, State.FAILED, f"limit: {event.over}", now)
    if event.code == 0:
        return _end(task, State.SUCCEEDED, "exited: exit code 0", now)
    by_signal = event.code is not None and event.code > EXIT_SIGNAL
    if task.stopping is Stopping.YIELD and (event.code == EXIT_YIELDED or by_signal):
        return _again(task)
    if task.stopping is Stopping.LATE:
        return _lost(task, "its program did not start in time", now)
    if event.problem:
        return _end(task, State.FAILED, f"start: {event.problem}", now)
    if task.device_lost:
        return _lost(task, f"it lost a device, and {_exit_text(event.code)}", now)
    if task.retry_exits_left > 0:
        return _again(replace(task, retry_exits_left=task.retry_exits_left - 1))
    code = "signal" if by_signal else "exited"
    return _end(task, State.FAILED, f"{code}: {_exit_text(event.code)}", now)


def _lost(task: Task, why: str, now: float) -> Outcome:
    """The pool lost the attempt, not the program's fault: again, as often as --retries allows."""
    if task.cancelling:
        return _end(task, State.CANCELLED, task.end_reason, now)
    if task.retries_left > 0:
        return _again(replace(task, retries_left=task.retries_left - 1))
    return _end(task, State.LOST, f"lost: {why}; no retries are left", now)


def _again(task: Task) -> Outcome:
    waiting = replace(
        task, state=State.WAITING, runner="", stopping=Stopping.NO, device_lost=False,
        attempt_at=None,
    )  # fmt: skip
    return Outcome(waiting, (Step.FREE,))


def _end(task: Task, state: State, why: str, now: float) -> Outcome:
    steps = (Step.FREE, Step.END) if task.state in ACTIVE else (Step.END,)
    ended = replace(
        task, state=state, end_reason=why, ended_at=now, stopping=Stopping.NO, device_lost=False
    )  # fmt: skip
    return Outcome(ended, steps)


def _exit_text(code: int | None) -> str:
    if code is None:
        return "its program did not run"
    if code > EXIT_SIGNAL:
        return f"it was killed by signal {code - EXIT_SIGNAL}"
    return f"exit code {code}"


def wait_code(state: State, exit_code: int | None) -> int:
    """Return the exit code of `shoal wait` for a task that has ended.

    >>> wait_code(State.FAILED, 3), wait_code(State.CANCELLED, 143)
    (3, 130)
    """
    match state:
        case State.SUCCEEDED:
            return 0
        case State.CANCELLED:
            return EXIT_CANCELLED
        case State.FAILED if exit_code:
            return exit_code
        case _:
            return EXIT_SHOAL
