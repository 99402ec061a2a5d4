"""Threads that wait for work and never keep the program from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

IDLE_S = 30.0


class DaemonPool:
    """Runs each piece of work at once, in a thread that rests or, if there is none, a new one.

    Work that waits for other work can never wait for a free thread here.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._resting = 0

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            grow = self._resting == 0
            if not grow:
                self._resting -= 1  # taken for this work
        self._queue.put((future, work))
        if grow:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            try:
                future, work = self._queue.get(timeout=IDLE_S)
            except Empty:
                with self._lock:
                    if self._resting == 0:
                        continue  # somebody counts on this thread
                    self._resting -= 1
                return
            try:
                future.set_result(work())
            except BaseException as error:  # the future carries it
                future.set_exception(error)
            del future, work
            with self._lock:
                self._resting += 1
