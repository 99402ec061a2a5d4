"""Groups issue their work one after another, where that holds nobody up.

Threads that call torch at the same time take the interpreter from each other at every operator, which
costs more than the operator. Devices run behind their threads, so it does not matter to them that one
group's work is issued a few milliseconds after another's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = (
    0.02  # that a thread waits for its turn: longer than any issues what a device runs behind
)
#: Turns that nobody waits for after somebody was long: its forward pass reads values, so
#: that it waits for its device, and the others' devices would stand still meanwhile.
FREE_TURNS = 50


class Turns:
    """Who may issue. A turn is a courtesy, not a lock: whoever waits too long goes ahead.

    >>> turns = Turns()
    >>> with turns.turn():
    ...     loss = model(x)
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._free = 0  # turns that need not be waited for

    @contextmanager
    def turn(self) -> Iterator[None]:
        if self._free > 0:
            self._free -= 1
            yield
            return
        mine = self._lock.acquire(timeout=self._patience_s)
        if not mine:
            self._free = FREE_TURNS
        start = time.perf_counter()
        try:
            yield
        finally:
            if mine:
                self._lock.release()
            if time.perf_counter() - start > self._patience_s:
                self._free = FREE_TURNS
