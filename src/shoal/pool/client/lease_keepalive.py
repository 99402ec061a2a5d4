"""Keeps a lease of a standing pool: beats, comes back after the head was away, hears what was lost."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

from shoal.errors import ShoalError
from shoal.pool import limits, messages
from shoal.pool.client import Connection
from shoal.pool.fields import SessionPart

RELEASE_S = 2.0


class LeaseOver(Exception):
    """The head says that the lease has ended."""


class Keeper:
    """A thread with the lease's connection to the head. Sessions go on without it, and without a head.

    Args:
        on_lost: called in the thread with the parts of the session that are over, and why.
        uses: what the session has done so far on each device, for `shoal top`.
    """

    def __init__(
        self,
        connection: Connection,
        lease: messages.Lease,
        on_lost: Callable[[list[SessionPart], str], None],
        uses: Callable[[], list[messages.SessionUse]],
    ) -> None:
        self._connection: Connection | None = connection
        self._url = connection.url
        self._lease = lease
        self._parts = {d.part for d in lease.devices}
        self._on_lost = on_lost
        self._uses = uses
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="shoal-lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Gives the lease back. The head has heard it when this returns, if it is there."""
        if not self._stopping:
            self._stopping = True
            os.write(self._wake_write, b"x")
            self._thread.join(RELEASE_S + 1)

    def abandon(self) -> None:
        """In a forked child: lets go of the parent's connection without a word."""
        self._stopping = True
        connection, self._connection = self._connection, None
        if connection is not None:
            os.close(connection.socket.detach())
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        try:
            while not self._stopping:
                if self._connection is None:
                    self._come_back()
                else:
                    self._keep(self._connection)
            self._give_back()
        except LeaseOver as over:
            self._lost(sorted(self._parts), str(over))
        finally:
            if self._connection is not None:
                self._connection.close()

    def _keep(self, connection: Connection) -> None:
        """Beats until the connection breaks."""
        heard = next_beat = time.monotonic()
        try:
            while not self._stopping:
                now = time.monotonic()
                if now >= next_beat:
                    connection.send(messages.Beat(self._uses()))
                    next_beat = now + limits.BEAT_S
                while (message := self._next(connection, next_beat - now)) is not None:
                    heard = now = time.monotonic()
                    if isinstance(message, messages.SessionsLost):
                        self._lost(message.parts, message.reason)
                    elif isinstance(message, messages.Refusal):
                        raise LeaseOver(message.reason)
                if time.monotonic() - heard > limits.SILENCE_S:
                    break
        except ShoalError:
            pass
        if not self._stopping:
            connection.close()
            self._connection = None

    def _next(self, connection: Connection, wait_s: float) -> messages.Message | None:
        """A message that came within `wait_s`, unless the program wants to end."""
        message = connection.buffered()
        if message is not None:
            return message
        fds = [connection.socket.fileno(), self._wake_read]
        ready, _, _ = select.select(fds, [], [], max(0.0, wait_s))
        return connection.receive(limits.FRAME_S) if fds[0] in ready else None

    def _come_back(self) -> None:
        """One try to find the head, and the lease there."""
        connection = None
        try:
            connection = Connection(self._url, limits.HANDSHAKE_S)
            lease = self._lease
            connection.send(messages.Resume(lease.lease, lease.epoch, lease.secret))
            answer = connection.receive(limits.HANDSHAKE_S)
        except (ShoalError, OSError):
            if connection is not None:
                connection.close()
            select.select([self._wake_read], [], [], limits.RETRY_S)
            return
        if not isinstance(answer, messages.Resumed):
            connection.close()
            reason = answer.reason if isinstance(answer, messages.Refusal) else "it is not known"
            raise LeaseOver(reason)
        self._connection = connection
        gone = self._parts - set(answer.parts)
        if gone:
            self._lost(sorted(gone), "it was lost while the head was away")

    def _lost(self, parts: list[SessionPart], reason: str) -> None:
        known = [p for p in parts if p in self._parts]
        self._parts -= set(known)
        if known and not self._stopping:
            self._on_lost(known, reason)

    def _give_back(self) -> None:
        if self._connection is None:
            return
        try:
            self._connection.send(messages.Release())
            while not isinstance(self._connection.receive(RELEASE_S), messages.Done):
                pass
        except ShoalError:
            pass  # the head is away: it ends the lease when nobody comes back to it
