"""A lock under which groups issue their work one after another, where that delays no device.

Threads that call torch at the same time take the GIL from each other at every operator, which costs
more than the operator. Devices run behind their threads, so a device does not notice that its work is
issued a few milliseconds after another group's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: Seconds that a thread waits for the lock: longer than any thread issues work ahead of its device.
PATIENCE_S = 0.02
#: Passes without the lock after a thread held it for too long. The model of that thread reads values,
#: so the thread waits for its device, and the other devices would be idle meanwhile.
UNLOCKED_PASSES = 50


class IssueLock:
    """An advisory lock: a thread that waits too long goes ahead without it.

    >>> lock = IssueLock()
    >>> with lock.held():
    ...     loss = model(x)
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._unlocked = 0  # passes that do not wait for the lock

    @contextmanager
    def held(self) -> Iterator[None]:
        if self._unlocked > 0:
            self._unlocked -= 1
            yield
            return
        mine = self._lock.acquire(timeout=self._patience_s)
        if not mine:
            self._unlocked = UNLOCKED_PASSES
        start = time.perf_counter()
        try:
            yield
        finally:
            if mine:
                self._lock.release()
            if time.perf_counter() - start > self._patience_s:
                self._unlocked = UNLOCKED_PASSES
