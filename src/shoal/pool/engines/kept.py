"""A process that a thread keeps running, in the process of an actor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shoal.errors import describe
from shoal.pool.base import limits, process
from shoal.pool.local.supervisor import Supervised, Supervisor


class Kept:
    """Starts the process, restarts it when it ends, and tries again where it cannot start.

    The kernel kills the process when this thread ends: with its actor, however that ends.

    Args:
        prepare: sets what the process needs; it may raise, and is called before each attempt.
    """

    def __init__(self, one: Supervised, prepare: Callable[[Supervised], None]) -> None:
        self.problem = "it is starting"
        self._one = one
        self._prepare = prepare
        self._supervisor = Supervisor([one], signals=False)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"keep {one.name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The process; 0: it does not run now."""
        child = self._one.child
        return child.pid if child is not None and child.returncode is None else 0

    @property
    def since(self) -> float:
        return self._one.since

    @property
    def restarts(self) -> int:
        return max(0, self._one.restarts)

    def stop(self) -> None:
        """End the process, and do not start it again. Return when it has ended."""
        self._stopping.set()
        self._supervisor.stop()
        self._thread.join(limits.STOP_S)

    def _run(self) -> None:
        backoff = process.Backoff()
        while not self._stopping.is_set():
            begin = time.monotonic()
            try:
                self._prepare(self._one)
                self._supervisor.start()
                self.problem = ""
                self._supervisor.run()
            except Exception as error:  # whatever it is, the next attempt may go well
                self.problem = describe(error)
            finally:
                self._supervisor.end()
            self._stopping.wait(backoff.ended(time.monotonic() - begin >= limits.WORKED_S))
