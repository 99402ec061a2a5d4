"""Writes the head's changes from a thread of its own: one commit for whatever has gathered.

A commit waits for the disk, which the head's event loop must not: it hears beats. Changes are written
in the order in which they were added. If the disk takes none, promises fail and everything else stays
in the queue, before whatever comes later.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import PoolError
from shoal.pool.base import limits
from shoal.pool.head import migrations

Write = Callable[[sqlite3.Connection], None]
_log = logging.getLogger(__name__)
#: Errors of the file or its disk. All others are of the change itself.
_OF_THE_DISK = (sqlite3.OperationalError, sqlite3.InternalError)


class StoreError(PoolError):
    """The state could not be written; nothing of the change was kept."""


@dataclass(slots=True, eq=False)
class Pending:
    """A change that was queued. After `flushed`, `error` says whether it failed."""

    write: Write
    promise: bool
    number: int  # in the order of the queue
    error: str = ""


class Journal:
    """Args:
    database: of a store in memory, which is written at once; None: the thread opens `path`.
    """

    def __init__(self, database: sqlite3.Connection | None, path: Path | None) -> None:
        self.failed = 0
        self.error = ""  # of the last write; empty: it went well
        self.kept = 0  # changes that wait for room
        self._database = database
        self._path = path
        # Guards everything below; notified when changes come and when they were tried.
        self._changed = threading.Condition()
        self._queue: deque[Pending] = deque()
        self._added = 0  # the number of the last change
        self._tried = 0  # all changes up to this one were tried at least once
        self._waiters: list[tuple[int, asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._closing = False
        self._thread: threading.Thread | None = None

    def add(self, write: Write, *, promise: bool) -> Pending:
        """Queue a change."""
        with self._changed:
            self._added += 1
            pending = Pending(write, promise, self._added)
            self._queue.append(pending)
            if self._path is not None and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="shoal-store", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        if self._database is not None:
            self._write_gathered(self._database)
        return pending

    async def flushed(self, *promises: Pending) -> None:
        """Return when all changes so far were tried. Raise StoreError if one of `promises` failed."""
        loop = asyncio.get_running_loop()
        with self._changed:
            number = self._added
            waits = self._tried < number
            if waits:
                future: asyncio.Future[None] = loop.create_future()
                self._waiters.append((number, loop, future))
        if waits:
            try:
                async with asyncio.timeout(limits.STORE_FLUSH_S):
                    await future
            except TimeoutError:
                raise _stuck() from None
        _check(promises)

    def flush(self, *promises: Pending) -> None:
        """Do as `flushed`, and block meanwhile."""
        with self._changed:
            number = self._added
            if not self._changed.wait_for(lambda: self._tried >= number, limits.STORE_FLUSH_S):
                raise _stuck()
        _check(promises)

    def close(self) -> None:
        """Write what waits, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(limits.STORE_FLUSH_S)

    # --- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        database: sqlite3.Connection | None = None
        while self._wait():
            try:
                if database is None:
                    database = migrations.connect(self._path)
                self._write_gathered(database)
            except sqlite3.Error as error:  # it cannot even be opened
                with self._changed:
                    self._fail(list(self._queue), error)
        if database is not None:
            database.close()

    def _wait(self) -> bool:
        """Wait for changes that were not tried yet. Return False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._tried < self._added or self._closing)
            return self._tried < self._added

    def _write_gathered(self, database: sqlite3.Connection) -> None:
        """Commit everything in the queue, or keep what must not be lost."""
        with self._changed:
            gathered = list(self._queue)
        problem: sqlite3.Error | None = None
        wrong: list[Pending] = []
        while True:
            current: Pending | None = None
            try:
                database.execute("BEGIN IMMEDIATE")
                for current in gathered:
                    if not current.error:
                        current.write(database)
                current = None
                database.execute("COMMIT")
                break
            except Exception as error:
                if database.in_transaction:
                    database.execute("ROLLBACK")
                if current is None or isinstance(error, _OF_THE_DISK):
                    if not isinstance(error, sqlite3.Error):
                        raise
                    problem = error
                    break
                # The change itself is wrong, not the disk: write the others without it.
                current.error = f"the head's state does not allow this: {error}"
                wrong.append(current)
        for pending in wrong:
            if not pending.promise:
                _log.error("a change of the head's state is dropped: %s", pending.error)
        with self._changed:
            if problem is not None:
                self._fail(gathered, problem)
            else:
                self.error, self.kept = "", 0
                self._settle(gathered, kept=[])

    def _fail(self, gathered: list[Pending], problem: sqlite3.Error) -> None:
        """Note that the disk takes nothing. The caller holds the lock."""
        self.failed += 1
        self.error = str(problem)
        text = f"the head cannot write its state: {problem}. Is the disk full? Check with: df"
        for pending in gathered:
            if pending.promise and not pending.error:
                pending.error = text
        kept = [p for p in gathered if not p.promise and not p.error]
        self.kept = len(kept)
        self._settle(gathered, kept)

    def _settle(self, gathered: list[Pending], kept: list[Pending]) -> None:
        """Leave `kept` in the queue and wake who waits for these changes. The caller holds the lock."""
        for _ in gathered:
            self._queue.popleft()
        self._queue.extendleft(reversed(kept))
        self._tried = max([self._tried, *(p.number for p in gathered)])
        ready = [w for w in self._waiters if w[0] <= self._tried]
        self._waiters = [w for w in self._waiters if w[0] > self._tried]
        for loop in {loop for _, loop, _ in ready}:
            mine = [future for _, other, future in ready if other is loop]
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, mine)
        self._changed.notify_all()


def _wake(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _check(promises: tuple[Pending, ...]) -> None:
    for promise in promises:
        if promise.error:
            raise StoreError(promise.error)


def _stuck() -> StoreError:
    return StoreError(
        f"the disk with the head's state took no change for {limits.STORE_FLUSH_S:g} s. Check it with: "
        "df, dmesg"
    )
