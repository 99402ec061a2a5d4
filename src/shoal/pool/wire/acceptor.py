"""Accepts connections and keeps the pending ones: those that have not shown who they are.

No process waits for a pending connection. Each has a deadline, they are few at a time, and few of
them come from one address.
"""

from __future__ import annotations

import errno
import heapq
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from shoal.errors import ProtocolError
from shoal.pool.base import limits, process


class Timer(Protocol):
    def cancel(self) -> None: ...


class Loop(Protocol):
    """The part of asyncio's event loop that an acceptor uses."""

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> Any: ...
    def remove_reader(self, fd: Any) -> Any: ...
    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Timer: ...


@dataclass(eq=False)
class PendingConnection:
    """A connection that has not shown who it is."""

    socket: socket.socket
    address: str = ""  # of a TCP peer
    timer: Timer | None = None


Pending = TypeVar("Pending", bound=PendingConnection)


class Acceptor(Generic[Pending]):
    """Accepts connections of a listener, until `close`.

    On a Unix socket it takes only those of the pool's own user.

    Args:
        make: the class of its pending connections.
        accepted: called with each new one.
        late: called with one that is still pending after `patience_s`; it must call `drop`.
        most: pending connections at a time.
        most_per_address: of these, from one address.
    """

    def __init__(
        self,
        listener: socket.socket,
        loop: Loop,
        make: type[Pending],
        accepted: Callable[[Pending], None],
        late: Callable[[Pending], None] | None = None,
        *,
        most: int,
        most_per_address: int | None = None,
        patience_s: float | None = None,
    ) -> None:
        listener.setblocking(False)
        self.pending: set[Pending] = set()
        self._listener = listener
        self._loop = loop
        self._make = make
        self._accepted = accepted
        self._late = late or self.drop
        self._most = most
        self._most_per_address = most if most_per_address is None else most_per_address
        self._patience_s = patience_s
        self._by_address: Counter[str] = Counter()
        self._is_local = listener.family == socket.AF_UNIX
        loop.add_reader(listener, self._accept)

    def limit(self, most: int, most_per_address: int) -> None:
        """Take fewer pending connections from now on; those that are there stay."""
        self._most, self._most_per_address = most, most_per_address

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._loop.remove_reader(self._listener)  # it stays readable: do not spin
                self._loop.call_later(
                    limits.ACCEPT_RETRY_S, self._loop.add_reader, self._listener, self._accept
                )
            return  # else the peer gave up already
        made = self._make(sock, "" if self._is_local else str(address[0]))
        try:
            if self._crowded(made.address):
                raise ProtocolError("too many connections are pending")
            if self._is_local:
                process.check_same_user(sock)
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
        except (OSError, ProtocolError):
            sock.close()
            return
        self.pending.add(made)
        self._by_address[made.address] += 1
        if self._patience_s is not None:
            made.timer = self._loop.call_later(self._patience_s, self._late, made)
        self._accepted(made)

    def _crowded(self, address: str) -> bool:
        full = len(self.pending) >= self._most
        return full or (bool(address) and self._by_address[address] >= self._most_per_address)

    def release(self, pending: Pending) -> None:
        """Stop counting a connection, and its deadline: it has shown who it is, or has ended."""
        if pending not in self.pending:
            return
        self.pending.discard(pending)
        self._by_address[pending.address] -= 1
        self._by_address += Counter()  # forgets addresses without connections
        self.stop_timer(pending)

    def stop_timer(self, pending: Pending) -> None:
        if pending.timer is not None:
            pending.timer.cancel()
            pending.timer = None

    def drop(self, pending: Pending) -> None:
        """Close a pending connection that the loop reads."""
        if pending in self.pending:
            self.release(pending)
            self._loop.remove_reader(pending.socket)
            pending.socket.close()

    def abandon(self, but: Collection[object]) -> None:
        """In a forked child: close every descriptor without a word, except one connection's."""
        self._listener.close()
        for pending in self.pending:
            if pending.socket not in but:
                socket.socket(fileno=pending.socket.detach()).close()


# --- an event loop for a process that forks --------------------------------------------------------


@dataclass(order=True)
class _Due:
    at: float  # monotonic
    number: int
    callback: Callable[[], Any] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.cancelled = True


class SelectorLoop:
    """Readers and timers, without asyncio: a forked child lets go of it by closing it."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._callbacks: dict[int, Callable[[], Any]] = {}
        self._due: list[_Due] = []
        self._timers = 0

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        key = self._selector.register(number, selectors.EVENT_READ)
        self._callbacks[key.fd] = lambda: callback(*args)

    def remove_reader(self, fd: Any) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        if self._callbacks.pop(number, None) is not None:
            self._selector.unregister(number)

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Timer:
        self._timers += 1
        due = _Due(time.monotonic() + delay, self._timers, lambda: callback(*args))
        heapq.heappush(self._due, due)
        return due

    def run_once(self) -> None:
        """Wait for the next event and call what it concerns."""
        while self._due and self._due[0].cancelled:
            heapq.heappop(self._due)
        timeout_s = max(0.0, self._due[0].at - time.monotonic()) if self._due else None
        found = [(key.fd, self._callbacks[key.fd]) for key, _ in self._selector.select(timeout_s)]
        for fd, callback in found:
            if self._callbacks.get(fd) is callback:  # else an earlier one has removed it
                callback()
        while self._due and (self._due[0].cancelled or self._due[0].at <= time.monotonic()):
            due = heapq.heappop(self._due)
            if not due.cancelled:
                due.callback()

    def close(self) -> None:
        with suppress(OSError):
            self._selector.close()
