"""The door of a device server for clients elsewhere: TLS 1.3, a certificate of this pool, and a lease.

It never waits for anybody: every connection is non-blocking and has one deadline for handshake and
request together. Whoever passes is handed on; see DeviceServer.take_network_session.

Data connections of a session come to the same port. They begin with some plain bytes that say which
session they are for, and are passed on to its worker, which does what the door does for the others:
TLS, certificate and secret.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import ProtocolError
from shoal.pool.base import limits
from shoal.pool.wire import frames, messages, node_messages, tls

VISITORS_MAX = 64


@dataclass
class TlsConnection:
    """An authenticated connection, still non-blocking."""

    socket: ssl.SSLSocket
    peer: tls.Peer

    def send(self, message: messages.Message) -> None:
        """Sends a small message; what does not fit the socket's buffer is not waited for."""
        with suppress(OSError):
            self.socket.send(frames.encode(message))


PREFIX_BYTES = len(messages.DATA_MAGIC) + messages.DATA_ID_BYTES


@dataclass
class Visitor:
    connection: socket.socket  # plain until its first byte has said what it wants
    deadline: float
    prefix: bytearray | None = None  # of a data connection, as far as it has come
    inbox: frames.Inbox = field(default_factory=frames.Inbox)
    peer: tls.Peer | None = None  # once the handshake is done


def no_grant(attach: messages.Attach, client: str) -> node_messages.Grant:
    raise ProtocolError("this device server grants nothing")


class Door:
    def __init__(self, listener: socket.socket, identity: Path) -> None:
        self.listener = listener
        self.check: Callable[[messages.Attach, str], node_messages.Grant] = no_grant
        self.identity = tls.Identity.load(identity)
        self._context = tls.server_context(self.identity)
        self._visitors: dict[socket.socket, Visitor] = {}
        self._selector: selectors.BaseSelector | None = None
        self._hand_over: Callable[[TlsConnection, messages.Attach], None] = lambda c, a: None
        self._pass_data: Callable[[bytes, socket.socket], None] = lambda i, c: None
        self._take_reader: Callable[[TlsConnection, messages.AttachReader], None] = lambda c, a: (
            None
        )

    def open(
        self,
        selector: selectors.BaseSelector,
        hand_over: Callable[[TlsConnection, messages.Attach], None],
        pass_data: Callable[[bytes, socket.socket], None],
        take_reader: Callable[[TlsConnection, messages.AttachReader], None],
    ) -> None:
        self._selector = selector
        self._hand_over = hand_over
        self._pass_data = pass_data
        self._take_reader = take_reader
        self.listener.setblocking(False)
        selector.register(self.listener, selectors.EVENT_READ)

    def close(self, but: Collection[object]) -> None:
        """Lets go of everything without a word: for a forked child, which keeps one."""
        self.listener.close()
        for connection in self._visitors:
            if connection not in but:
                socket.socket(fileno=connection.detach()).close()

    def hear(self, ready: Collection[object]) -> None:
        """Goes on with whoever has said something, and drops who is late."""
        if self.listener in ready:
            self._accept()
        for visitor in [v for c, v in self._visitors.items() if c in ready]:
            self._go_on(visitor)
        now = time.monotonic()
        for visitor in [v for v in self._visitors.values() if v.deadline < now]:
            self._drop(visitor)

    def _accept(self) -> None:
        assert self._selector is not None
        try:
            plain, _ = self.listener.accept()
        except OSError:
            return
        if len(self._visitors) >= VISITORS_MAX:
            plain.close()
            return
        plain.setblocking(False)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        visitor = Visitor(plain, time.monotonic() + limits.HANDSHAKE_S)
        self._visitors[plain] = visitor
        self._selector.register(plain, selectors.EVENT_READ)

    def _go_on(self, visitor: Visitor) -> None:
        try:
            if not isinstance(visitor.connection, ssl.SSLSocket):
                self._sort(visitor)
            if isinstance(visitor.connection, ssl.SSLSocket):
                self._go_on_with_tls(visitor, visitor.connection)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            return
        except OSError:
            self._drop(visitor)

    def _sort(self, visitor: Visitor) -> None:
        """A handshake of TLS never begins with the letter that a data connection begins with."""
        plain = visitor.connection
        if visitor.prefix is None:
            first = plain.recv(1, socket.MSG_PEEK)
            if not first:
                return self._drop(visitor)
            if first != messages.DATA_MAGIC[:1]:
                return self._wrap(visitor)
            visitor.prefix = bytearray()
        more = plain.recv(PREFIX_BYTES - len(visitor.prefix))
        visitor.prefix += more
        magic, data_id = visitor.prefix[:8], bytes(visitor.prefix[8:])
        if len(visitor.prefix) == PREFIX_BYTES and magic == messages.DATA_MAGIC:
            self._pass_data(data_id, plain)
        if not more or len(visitor.prefix) == PREFIX_BYTES:
            self._drop(visitor)

    def _wrap(self, visitor: Visitor) -> None:
        assert self._selector is not None
        plain = visitor.connection
        self._selector.unregister(plain)
        del self._visitors[plain]
        visitor.connection = self._context.wrap_socket(
            plain, server_side=True, do_handshake_on_connect=False
        )
        self._visitors[visitor.connection] = visitor
        self._selector.register(visitor.connection, selectors.EVENT_READ)

    def _go_on_with_tls(self, visitor: Visitor, connection: ssl.SSLSocket) -> None:
        try:
            if visitor.peer is None:
                connection.do_handshake()
                visitor.peer = tls.peer_of(connection)
            while visitor.inbox.read(connection):
                attach = visitor.inbox.next()
                if attach is not None:
                    self._pass(visitor, connection, attach)
                    return
            self._drop(visitor)
        except ProtocolError as error:
            if visitor.peer is not None:  # only those of the pool are told why
                TlsConnection(connection, visitor.peer).send(messages.refusal(str(error)))
            self._drop(visitor)

    def _pass(self, visitor: Visitor, connection: ssl.SSLSocket, attach: messages.Message) -> None:
        peer = visitor.peer
        if not isinstance(attach, (messages.Attach, messages.AttachReader)) or peer is None:
            raise ProtocolError("a session over the network starts with Attach")
        problem = messages.version_mismatch(attach.versions, messages.our_versions())
        if problem:
            raise ProtocolError(problem)
        if peer.role != "client":
            raise ProtocolError(f"a {peer.role} has no sessions")
        if isinstance(attach, messages.AttachReader):
            self._take_reader(TlsConnection(connection, peer), attach)
        else:
            self.check(attach, peer.name)
            self._hand_over(TlsConnection(connection, peer), attach)
        self._drop(visitor)

    def _drop(self, visitor: Visitor) -> None:
        """Hangs up. A worker that took the connection over has a descriptor of its own."""
        assert self._selector is not None
        if self._visitors.pop(visitor.connection, None) is not None:
            self._selector.unregister(visitor.connection)
            visitor.connection.close()
