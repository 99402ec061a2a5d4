"""What the threads of one step tell each other: one-shot events, results and the first error.

The trainer's thread and the groups' threads go through a step in this order:

1. Every group computes, and its exchange queues the sums of gradients: `Event.SUMMED`.
2. Every group leaves its `GroupResult` and sets `Event.READY`.
3. The trainer's thread decides: `commit(Decision.UPDATE)` or `commit(Decision.SKIP)`. The decision
   sets `Event.DECIDED`, and the groups update their weights or not.

`fail()` ends the step for all threads at any point before the decision.
"""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass

from shoal.train.group.errors import TrainError


class Event(enum.Enum):
    SUMMED = enum.auto()  # the sums of all gradients are queued
    READY = enum.auto()  # of one replica: it needs only the decision
    DECIDED = enum.auto()  # the step counts


class Decision(enum.Enum):
    UPDATE = enum.auto()
    SKIP = enum.auto()  # the step counts, but the weights stay as they are


class Aborted(BaseException):
    """Ends a wait because the step has failed in another thread. Never reaches the user."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The first error of a step."""

    group: int | None  # None: the trainer's own thread failed
    error: BaseException


@dataclass(slots=True)
class GroupResult:
    """What a group's thread leaves for the trainer's before it sets `Event.READY`."""

    loss: float | None = None  # None: the loss was not read
    overflowed: bool = False  # a scaled gradient is not finite


class StepEvents:
    """The events of one step. Every wait has a deadline and says what it waits for.

    >>> events = StepEvents(replicas=1)
    >>> events.set(Event.SUMMED)
    >>> events.wait(Event.SUMMED, "the sums", 1.0)
    """

    def __init__(self, replicas: int) -> None:
        self.results = [GroupResult() for _ in range(replicas)]
        self.failure: Failure | None = None
        self.decision: Decision | None = None
        self._lock = threading.Lock()
        # One object for each event: setting it wakes only the threads that wait for it.
        self._waits: dict[tuple[Event, int | None], threading.Event] = {}
        self._set: set[tuple[Event, int | None]] = set()

    def set(self, event: Event, slot: int | None = None) -> None:
        with self._lock:
            self._set.add((event, slot))
            wait = self._waits.setdefault((event, slot), threading.Event())
        wait.set()

    def commit(self, decision: Decision) -> bool:
        """Decide, once and for all threads, that the step counts. Return False if it has failed."""
        with self._lock:
            if self.failure is not None:
                return False
            self.decision = decision
        self.set(Event.DECIDED)
        return True

    def fail(self, group: int | None, error: BaseException) -> None:
        """End the step for all threads. A second error usually follows from the first, and an error
        after the commit belongs to the next step: both are ignored."""
        if isinstance(error, Aborted):
            return
        with self._lock:
            if self.decision is not None:
                return
            if self.failure is None:
                self.failure = Failure(group, error)
            waits = list(self._waits.values())
        for wait in waits:
            wait.set()

    def check(self) -> None:
        """Raise `Aborted` if the step has failed."""
        if self.failure is not None:
            raise Aborted

    def wait(self, event: Event, what: str, timeout_s: float, slot: int | None = None) -> None:
        """Wait for an event. Raise `Aborted` if the step fails, `TrainError` at the deadline."""
        key = event, slot
        with self._lock:
            if key in self._set:
                return
            if self.failure is not None:
                raise Aborted
            wait = self._waits.setdefault(key, threading.Event())
        if not wait.wait(timeout_s):
            raise TrainError(f"waited {timeout_s:g} s for {what}")
        with self._lock:
            if key not in self._set:
                raise Aborted

    def wait_decision(self, timeout_s: float) -> Decision:
        """Wait until the trainer's thread decides about the step."""
        self.wait(Event.DECIDED, "the other groups", timeout_s)
        assert self.decision is not None
        return self.decision
