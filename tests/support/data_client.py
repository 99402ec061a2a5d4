"""A client of a device elsewhere that says on its data connections whatever a test wants."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct

from shoal import _core  # the core first: it sets up torch
from shoal.device import network
from shoal.pool.client import head_connection
from shoal.pool.wire import messages, session_messages, tls

PURPOSES = {"up": 1, "down": 2, "read": 3, "progress": 4}
ANSWER = b"SHOALOK\n"
KIND = {"call": 2, "allocate": 4, "adopt": 6, "copy_in": 8, "copy_out": 9, "sync": 20}


def message(kind: int, *words: int, data: bytes = b"") -> bytes:
    """A message of the op stream, and bytes behind it."""
    header = 8 * (1 + len(words)) | kind << 32
    return struct.pack(f"<{1 + len(words)}Q", header, *words) + data


class DataClient:
    """A lease and a worker for it; the data connections are the test's to open."""

    def __init__(self, identity: tls.Identity) -> None:
        self.identity = identity
        self.head, lease = head_connection.ask(identity.url, messages.AskLease(1, 16 << 20, []))
        assert isinstance(lease, messages.Lease)
        self.lease = lease
        self.session = lease.devices[0].session
        self.attached = network.attach(lease.devices[0], self.head, lease)
        self.worker_pid = self.attached.welcome.worker_pid

    def dial(self, data_id: bytes | None = None) -> socket.socket:
        """A connection that has said whom it is for."""
        plain = socket.create_connection((self.attached.host, self.attached.port), 10)
        named = self.attached.welcome.data_id if data_id is None else data_id
        plain.sendall(session_messages.DATA_MAGIC + named)
        return plain

    def context(self, identity: tls.Identity | None = None) -> ssl.SSLContext:
        """TLS to the worker, which has a certificate of its own."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_cert_chain((identity or self.identity).path)
        context.load_verify_locations(cadata=self.attached.welcome.certificate)
        return context

    def open(
        self,
        purpose: str | int,
        *,
        secret: bytes | None = None,
        identity: tls.Identity | None = None,
        lane: int = 0,
        lanes: int = 0,
    ) -> ssl.SSLSocket:
        """A connection that has said its greeting."""
        connection = self.context(identity).wrap_socket(
            self.dial(), server_hostname=_core.SESSION_SERVER_NAME
        )
        shown = self.attached.welcome.secret if secret is None else secret
        number = PURPOSES[purpose] if isinstance(purpose, str) else purpose
        connection.sendall(shown + struct.pack("<II", number, lanes << 16 | lane))
        return connection

    def both(self) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
        """Up and down, as a good client opens them."""
        up, down = self.open("up"), self.open("down")
        assert up.recv(8) == down.recv(8) == ANSWER
        return up, down

    def __enter__(self) -> DataClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.attached.connection.close()
        with contextlib.suppress(Exception):
            self.head.ask(messages.Release(), 10)
        self.head.close()


def until_end(connection: socket.socket) -> bytes:
    """Everything that still comes before the other side closes."""
    connection.settimeout(10)
    heard = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while more := connection.recv(65536):
            heard += more
    return heard
