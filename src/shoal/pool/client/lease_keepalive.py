"""Keeps a lease of a standing pool alive: sends beats, resumes the lease after the head was away, and
hears of losses."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from shoal.errors import ShoalError
from shoal.pool.base import limits, process
from shoal.pool.client.head_connection import Connection
from shoal.pool.wire import messages
from shoal.pool.wire.end_reasons import End, Why
from shoal.pool.wire.message_fields import SessionPart


class LeaseOver(Exception):
    """The head says that the lease has ended."""

    def __init__(self, end: End) -> None:
        super().__init__(end.text)
        self.end = end


class LeaseKeepalive:
    """A thread with the lease's connection to the head. Sessions run on without it, and without a head.

    Args:
        on_lost: called in the thread with the parts of the session that are over, and why.
        uses: returns what the session has done so far on each device, for `shoal top`.
    """

    def __init__(
        self,
        connection: Connection,
        lease: messages.Lease,
        on_lost: Callable[[list[SessionPart], End], None],
        uses: Callable[[], list[messages.SessionUse]],
    ) -> None:
        self._connection: Connection | None = connection
        self._url = connection.url
        self._lease = lease
        self._parts = {d.part for d in lease.devices}
        self._on_lost = on_lost
        self._uses = uses
        # Written to by other threads to wake this one, which closes it; -1: it has.
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_lock = threading.Lock()
        self._missed: list[messages.LostSight] = []  # to ask the head about
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="shoal-lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Give the lease back. When this returns the head has heard of it, unless it is away."""
        if not self._stopping:
            self._stopping = True
            self._wake_up()
            self._thread.join(limits.RELEASE_S + 1)

    def ask(self, part: SessionPart, seen: Why) -> bool:
        """Ask the head why a part of the session is gone. Return False if the thread has ended."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            return False
        self._missed.append(messages.LostSight([part], seen))
        self._wake_up()
        return True

    def _wake_up(self) -> None:
        with self._wake_lock:  # so the descriptor is still this thread's
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def abandon(self) -> None:
        """In a forked child: close the parent's connection without a message."""
        self._stopping = True
        connection, self._connection = self._connection, None
        if connection is not None:
            os.close(connection.socket.detach())
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _run(self) -> None:
        try:
            while not self._stopping:
                if self._connection is None:
                    self._resume()
                else:
                    self._keep(self._connection)
            self._give_back()
        except LeaseOver as over:
            self._lost(sorted(self._parts), over.end)
        finally:
            if self._connection is not None:
                self._connection.close()
            with self._wake_lock:
                os.close(self._wake)
                self._wake = -1

    def _keep(self, connection: Connection) -> None:
        """Send beats until the connection breaks."""
        heard = next_beat = time.monotonic()
        try:
            while not self._stopping:
                now = time.monotonic()
                if now >= next_beat:
                    connection.send(messages.Beat(self._uses()))
                    next_beat = now + limits.BEAT_S
                while self._missed:
                    connection.send(self._missed.pop(0))
                while (message := self._next(connection, next_beat - now)) is not None:
                    heard = now = time.monotonic()
                    if isinstance(message, messages.SessionsLost):
                        self._lost(message.parts, message.end)
                    elif isinstance(message, messages.Refusal):
                        raise LeaseOver(End(Why.REFUSED, message.reason))
                if time.monotonic() - heard > limits.SILENCE_S:
                    break
        except ShoalError:
            pass
        if not self._stopping:
            connection.close()
            self._connection = None

    def _next(self, connection: Connection, wait_s: float) -> messages.FromHead | None:
        """Return a message that comes within `wait_s`, or None."""
        message = connection.buffered()
        if message is not None:
            return message
        fd = connection.socket.fileno()
        return connection.receive(limits.FRAME_S) if fd in self._wait([fd], wait_s) else None

    def _wait(self, fds: list[int], wait_s: float) -> set[int]:
        """Sleep until one of `fds` is readable, another thread wakes this one, or time is up."""
        ready = process.wait_readable([*fds, self._wake], wait_s)
        if self._wake in ready:
            os.eventfd_read(self._wake)
        return ready

    def _resume(self) -> None:
        """Try once to reach the head and resume the lease."""
        connection = None
        try:
            connection = Connection(self._url, limits.HANDSHAKE_S)
            lease = self._lease
            connection.send(messages.Resume(lease.lease, lease.epoch, lease.secret))
            answer = connection.receive(limits.HANDSHAKE_S)
        except (ShoalError, OSError):
            if connection is not None:
                connection.close()
            self._wait([], limits.RETRY_S)
            return
        if isinstance(answer, messages.SessionsLost):  # the head knows what ended it
            connection.close()
            raise LeaseOver(answer.end)
        if not isinstance(answer, messages.Resumed):
            connection.close()
            reason = (
                answer.reason if isinstance(answer, messages.Refusal) else "the lease is not known"
            )
            raise LeaseOver(End(Why.REFUSED, reason))
        self._connection = connection
        for ended in answer.ended:
            self._lost([ended.part], ended.end)
        gone = self._parts - set(answer.parts)
        if gone:
            self._lost(sorted(gone), End(Why.UNKNOWN))

    def _lost(self, parts: list[SessionPart], end: End) -> None:
        known = [p for p in parts if p in self._parts]
        self._parts -= set(known)
        if known and not self._stopping:
            self._on_lost(known, end)

    def _give_back(self) -> None:
        if self._connection is None:
            return
        try:
            self._connection.send(messages.Release())
            while not isinstance(self._connection.receive(limits.RELEASE_S), messages.Done):
                pass
        except ShoalError:
            pass  # the head is away: it ends the lease when nobody comes back to it
