"""Messages both ways over one TLS connection, for the threads of a process.

OpenSSL allows one thread in a connection at a time, so the thread that calls `run` does all reading
and writing; other threads queue their messages.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Generic

import msgspec
from msgspec.msgpack import Decoder

from shoal.pool.base import limits
from shoal.pool.wire import frames, tls
from shoal.pool.wire.frames import Kind

if TYPE_CHECKING:
    import ssl


class ThreadedChannel(Generic[Kind]):
    """One end of a connection, which receives `kinds`. `run` ends when either side closes it."""

    def __init__(self, connection: ssl.SSLSocket, kinds: Decoder[Kind]) -> None:
        self._kinds = kinds
        library = tls.library()
        self._not_now = (library.SSLWantReadError, library.SSLWantWriteError)
        connection.setblocking(False)
        self._connection = connection
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._closing = False
        self._inbox = frames.Inbox()
        self._begun: float | None = None  # when the frame that is on its way began

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message. Raise ConnectionError if the connection is closed."""
        frame = frames.encode(message)
        with self._lock:
            if self._waiting_bytes + len(frame) > limits.OUTGOING_BYTES_MAX:
                self._closing = True  # the other side does not read
            if self._closing:
                raise ConnectionError("the connection is closed")
            self._waiting.append(frame)
            self._waiting_bytes += len(frame)
            self._wake()

    def close(self) -> None:
        """End `run`, from any thread."""
        with self._lock:
            self._closing = True
            self._wake()

    def _wake(self) -> None:
        """Wake `run`. The caller holds the lock, so the descriptor is still this channel's."""
        if self._wake_write >= 0:
            with suppress(BlockingIOError):  # it is full: awake already
                os.write(self._wake_write, b"x")

    def run(self, hear: Callable[[Kind], None]) -> None:
        """Call `hear` with each message until the connection ends. `hear` must not wait. Raise
        ProtocolError for bytes that are not a message."""
        outgoing = bytearray()
        try:
            while True:
                with self._lock:
                    if self._closing:
                        return
                    while self._waiting:
                        outgoing += self._waiting.popleft()
                self._write(outgoing)
                if not self._read(hear):
                    return
                self._sleep(bool(outgoing))
        except OSError:
            return  # the other side is gone
        finally:
            with self._lock:
                self._closing = True
                self._connection.close()
                os.close(self._wake_read)
                os.close(self._wake_write)
                self._wake_write = -1

    def _write(self, outgoing: bytearray) -> None:
        while outgoing:
            try:
                sent = self._connection.send(outgoing)
            except self._not_now:
                return
            del outgoing[:sent]
            with self._lock:
                self._waiting_bytes -= sent

    def _read(self, hear: Callable[[Kind], None]) -> bool:
        """Read what has come. Return False once the other side has closed."""
        while True:
            try:
                alive = self._inbox.read(self._connection)
            except self._not_now:
                break
            while (message := self._inbox.next(self._kinds)) is not None:
                hear(message)
                self._begun = None
            if not alive:
                return False
        if not self._inbox.begun:
            self._begun = None
        elif self._begun is None:
            self._begun = time.monotonic()
        elif time.monotonic() - self._begun > limits.FRAME_S:
            raise frames.Silence
        return True

    def _sleep(self, wants_write: bool) -> None:
        poll = select.poll()  # a program may have more descriptors than select() can count
        poll.register(self._connection, select.POLLIN | (select.POLLOUT if wants_write else 0))
        poll.register(self._wake_read, select.POLLIN)
        poll.poll(limits.BEAT_S * 1000)
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
