"""What the threads of one step tell each other: marks that are set once, and one failure."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass

from shoal.train.group.errors import TrainError

COMMIT = "commit"  # the mark that `Board.commit` sets


class Aborted(BaseException):
    """The step has failed elsewhere; whoever waits for it gives up. Never reaches the user."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Who failed and why; the first one counts."""

    group: int
    error: BaseException


class Board:
    """Marks of one step. Every wait has a deadline and says what it waits for.

    >>> board = Board()
    >>> board.mark("loaded")
    >>> board.wait("loaded", "the batch", 1.0)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[Hashable, threading.Event] = {}  # one each: a mark wakes who needs it
        self._marks: set[Hashable] = set()
        self._committed = False
        self._values: dict[tuple[str, int], float] = {}
        self.failure: Failure | None = None

    def mark(self, key: Hashable) -> None:
        with self._lock:
            self._marks.add(key)
            event = self._events.setdefault(key, threading.Event())
        event.set()

    def commit(self) -> bool:
        """Decides, once and for all threads alike, that the step counts; False if it has failed."""
        with self._lock:
            if self.failure is not None:
                return False
            self._committed = True
        self.mark(COMMIT)
        return True

    def fail(self, group: int, error: BaseException) -> None:
        """Ends the step for all. A second failure is usually a consequence of the first, and one
        after the commit is the next step's."""
        if isinstance(error, Aborted):
            return
        with self._lock:
            if self._committed:
                return
            if self.failure is None:
                self.failure = Failure(group, error)
            waiting = list(self._events.values())
        for event in waiting:
            event.set()

    def is_marked(self, key: Hashable) -> bool:
        with self._lock:
            return key in self._marks

    def put(self, name: str, slot: int, value: float) -> None:
        """Leaves a number for whoever waits for a later mark."""
        with self._lock:
            self._values[name, slot] = value

    def values(self, name: str) -> dict[int, float]:
        with self._lock:
            return {slot: v for (n, slot), v in self._values.items() if n == name}

    def check(self) -> None:
        if self.failure is not None:
            raise Aborted

    def wait(self, key: Hashable, what: str, timeout_s: float) -> None:
        """Waits for a mark. Raises `Aborted` when the step fails, `TrainError` at the deadline."""
        with self._lock:
            if key in self._marks:
                return
            if self.failure is not None:
                raise Aborted
            event = self._events.setdefault(key, threading.Event())
        if not event.wait(timeout_s):
            raise TrainError(f"waited {timeout_s:g} s for {what}")
        if not self.is_marked(key):
            raise Aborted
