"""The TLS port of a device server, for remote clients: TLS 1.3, a certificate of this pool, and a
lease.

Every connection is non-blocking and has one deadline for handshake and request together. An
authenticated client goes to `DeviceServer.take_remote_client`.

Data connections of a session come to the same port. They begin with plain bytes that name their
session, and go on to its worker, which demands TLS, certificate and secret in turn.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shoal.errors import ProtocolError
from shoal.pool.base import limits
from shoal.pool.wire import frames, messages, roles, session_messages, tls
from shoal.pool.wire.acceptor import Acceptor, Loop, PendingConnection
from shoal.pool.wire.session_messages import Attach, AttachReader

_PREFIX_BYTES = len(session_messages.DATA_MAGIC) + session_messages.DATA_ID_BYTES


@dataclass
class TlsConnection:
    """An authenticated connection, still non-blocking."""

    socket: ssl.SSLSocket
    peer: tls.Peer

    def hand_over(self, certificate: str) -> None:
        """Tell the client whose certificate it meets from now on, and forget the connection: the
        process with that certificate has a descriptor of its own."""
        with suppress(OSError):  # does not wait for room in the socket's buffer
            self.socket.send(frames.encode(session_messages.Handover(certificate)))
        self.socket.close()


class Server(Protocol):
    """The device server, as its TLS port sees it. ProtocolError refuses the client."""

    # These two take the connection over.
    def take_remote_client(self, connection: TlsConnection, attach: Attach) -> None: ...
    def take_reader(self, connection: TlsConnection, attach: AttachReader) -> None: ...
    def take_data_connection(self, data_id: bytes, connection: socket.socket) -> None: ...


@dataclass(eq=False)
class PendingTls(PendingConnection):
    """A connection to the TLS port. Its socket is plain until the first byte has come."""

    prefix: bytearray | None = None  # of a data connection, as far as it has come
    inbox: frames.Inbox = field(default_factory=frames.Inbox)
    peer: tls.Peer | None = None  # once the handshake is done


class TlsAcceptor:
    def __init__(self, listener: socket.socket, identity: Path) -> None:
        self.identity = tls.Identity.load(identity)
        self._listener = listener
        self._context = tls.server_context(self.identity)

    def open(self, loop: Loop, server: Server) -> None:
        """Accept connections from now on."""
        self._loop = loop
        self._server = server
        self._acceptor = Acceptor(
            self._listener,
            loop,
            PendingTls,
            lambda pending: loop.add_reader(pending.socket, self._go_on, pending),
            most=limits.GREETINGS_MAX,
            patience_s=limits.HANDSHAKE_S,
        )

    def _go_on(self, pending: PendingTls) -> None:
        try:
            if not isinstance(pending.socket, ssl.SSLSocket):
                self._sort(pending)
            if isinstance(pending.socket, ssl.SSLSocket):
                self._go_on_with_tls(pending, pending.socket)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            return
        except OSError:
            self._acceptor.drop(pending)

    def _sort(self, pending: PendingTls) -> None:
        """Tell TLS from data connections: no TLS handshake begins with the letter that they do."""
        plain = pending.socket
        if pending.prefix is None:
            first = plain.recv(1, socket.MSG_PEEK)
            if not first:
                return self._acceptor.drop(pending)
            if first != session_messages.DATA_MAGIC[:1]:
                return self._wrap(pending)
            pending.prefix = bytearray()
        more = plain.recv(_PREFIX_BYTES - len(pending.prefix))
        pending.prefix += more
        magic, data_id = pending.prefix[:8], bytes(pending.prefix[8:])
        if len(pending.prefix) == _PREFIX_BYTES and magic == session_messages.DATA_MAGIC:
            self._server.take_data_connection(data_id, plain)
        if not more or len(pending.prefix) == _PREFIX_BYTES:
            self._acceptor.drop(pending)

    def _wrap(self, pending: PendingTls) -> None:
        self._loop.remove_reader(pending.socket)
        pending.socket = self._context.wrap_socket(
            pending.socket, server_side=True, do_handshake_on_connect=False
        )
        self._loop.add_reader(pending.socket, self._go_on, pending)

    def _go_on_with_tls(self, pending: PendingTls, connection: ssl.SSLSocket) -> None:
        attach = None
        try:
            if pending.peer is None:
                connection.do_handshake()
                pending.peer = tls.peer_of(connection)
            while pending.inbox.read(connection):
                attach = pending.inbox.next(session_messages.FROM_REMOTE)
                if attach is not None:
                    self._take(pending.peer, connection, attach)
                    break
        except ProtocolError as error:
            if pending.peer is not None:  # a stranger gets no reason
                with suppress(OSError):  # does not wait for room in the socket's buffer
                    connection.send(frames.encode(messages.refusal(str(error))))
        else:
            if attach is not None:  # the device server has it until its worker can answer
                self._loop.remove_reader(connection)
                return self._acceptor.release(pending)
        self._acceptor.drop(pending)

    def _take(
        self, peer: tls.Peer | None, connection: ssl.SSLSocket, attach: Attach | AttachReader
    ) -> None:
        session_messages.check_versions(attach.versions)
        if peer is None or not roles.is_client(peer.role):
            raise ProtocolError(f"a {peer.role if peer else 'stranger'} does not have sessions")
        if isinstance(attach, AttachReader):
            self._server.take_reader(TlsConnection(connection, peer), attach)
        else:
            self._server.take_remote_client(TlsConnection(connection, peer), attach)
