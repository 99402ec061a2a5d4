"""A client's connection to a head: which pool, and one request with its answer."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from shoal.errors import LeaseError, ProtocolError
from shoal.pool.base import door, limits, paths
from shoal.pool.base.addresses import LOCAL_PREFIX, NETWORK_PREFIX, split_address
from shoal.pool.base.process import check_same_user
from shoal.pool.wire import frames, messages, tls
from shoal.pool.wire.frames import Silence

if TYPE_CHECKING:
    import ssl


def default_url() -> str | None:
    """Return the pool of a program that names none: $SHOAL_POOL, else the one that was joined."""
    named = os.environ.get("SHOAL_POOL")
    if named:
        return named
    if not os.path.exists(paths.identity_file()):
        return None
    identity = tls.default_identity()
    return identity.url if identity is not None else None


class Refused(LeaseError):
    """The head refused a request. `code` is for programs; `unblock` says what helps."""

    def __init__(self, answer: messages.Refusal) -> None:
        super().__init__(answer.reason)
        self.code, self.unblock = answer.code, answer.unblock


class Connection:
    """A framed connection to a head. No call waits longer than its `timeout_s`."""

    def __init__(self, url: str, timeout_s: float = limits.ANSWER_S) -> None:
        self.url = url
        self.host = ""  # at which a head on the network was reached
        self._inbox = frames.Inbox(frame_bytes_max=limits.ANSWER_BYTES_MAX)
        try:
            self.socket = self._open(timeout_s)
        except (OSError, ProtocolError) as error:
            raise PoolUnreachable(url, error) from None

    def _open(self, timeout_s: float) -> socket.socket:
        if self.url.startswith(LOCAL_PREFIX):
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                local.settimeout(timeout_s)
                _connect_local(local, self.url.removeprefix(LOCAL_PREFIX), timeout_s)
                check_same_user(local)
            except BaseException:
                local.close()
                raise
            return local
        if self.url.startswith(NETWORK_PREFIX):
            self.host, port = split_address(self.url.removeprefix(NETWORK_PREFIX))
            return open_tls(self.host, port, identity_for(self.url), "head.shoal", timeout_s)
        raise LeaseError(
            f"{self.url!r} is not the URL of a pool. A pool on this machine has a URL like "
            f"{LOCAL_PREFIX}… (the url of shoal.up()), a remote one {NETWORK_PREFIX}HOST:PORT"
        )

    def send(self, message: messages.FromClient) -> None:
        try:
            frames.send(self.socket, message)
        except OSError as error:
            raise frames.Broken(error) from None

    def buffered(self) -> messages.FromHead | None:
        """Return a message that has already come, if there is one."""
        return self._inbox.next(messages.FROM_HEAD)

    def receive(self, timeout_s: float) -> messages.FromHead:
        """Return the next message. Raise ProtocolError if it does not come in time."""
        deadline = time.monotonic() + timeout_s
        try:
            while (message := self._inbox.next(messages.FROM_HEAD)) is None:
                self.socket.settimeout(max(0.001, deadline - time.monotonic()))
                if not self._inbox.read(self.socket):
                    raise frames.Closed
        except TimeoutError:
            raise Silence from None
        except OSError as error:
            raise frames.Broken(error) from None
        return message

    def ask(
        self, request: messages.FromClient, timeout_s: float = limits.ANSWER_S
    ) -> messages.FromHead:
        """Return the answer to one request. Raise LeaseError if the head refuses or is silent."""
        try:
            self.send(request)
            answer = self.receive(timeout_s)
        except ProtocolError as error:
            raise PoolUnreachable(self.url, error) from None
        if isinstance(answer, messages.Refusal):
            raise Refused(answer)
        return answer

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _connect_local(local: socket.socket, pool: str, timeout_s: float) -> None:
    """Connect to a head of this machine, also while more programs connect than it has accepted."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            local.connect(paths.socket_name(pool, "head"))
            return
        except BlockingIOError:  # its queue is full
            if time.monotonic() > deadline:
                raise
            time.sleep(limits.ACCEPT_RETRY_S)


class PoolUnreachable(LeaseError):
    """A head does not answer, or this program cannot use it.

    `problem` is set if a certificate is not valid now.
    """

    def __init__(self, url: str, error: Exception) -> None:
        self.problem = tls.certificate_problem(error)
        super().__init__(self._text(url, error))

    def _text(self, url: str, error: Exception) -> str:
        if self.problem is not None:
            return f"the pool {url} cannot be used: {self.problem}."
        reason = getattr(error, "verify_message", None)  # of an ssl.SSLCertVerificationError
        if reason:
            return (
                f"the pool {url} is not the one that this machine joined: {reason}. If it was set up "
                "anew, join it again: shoal join CODE@HOST"
            )
        help_text = "Type: shoal doctor"
        if url.startswith(LOCAL_PREFIX):
            help_text = "Is the program that started it still running?"
            if os.environ.get("SHOAL_POOL") == url:
                help_text += " Unset SHOAL_POOL to use a pool of this program's own."
        return f"the pool {url} cannot be reached: {error}. {help_text}"


def identity_for(url: str) -> tls.Identity:
    """Return this user's identity for that pool."""
    identity = tls.default_identity()
    address = url.removeprefix(NETWORK_PREFIX)
    if identity is None:
        raise LeaseError(
            f"this machine has not joined {url}. Ask the pool's owner for a code (`shoal code`) and "
            f"type: shoal join CODE@{address}"
        )
    if split_address(identity.url.removeprefix(NETWORK_PREFIX)) != split_address(address):
        raise LeaseError(
            f"the identity in {identity.path} is for {identity.url}, not for {url}. Use that pool, "
            f"or join this one: shoal join CODE@{address}"
        )
    return identity


def open_tls(
    host: str, port: int, identity: tls.Identity, server_name: str, timeout_s: float
) -> ssl.SSLSocket:
    """Connect to a server of the pool, which must prove to be `server_name`."""
    context = tls.client_context(identity)
    deadline = time.monotonic() + min(timeout_s, limits.CONNECT_S)
    plain = door.dial(host, port, min(timeout_s, limits.CONNECT_S))
    try:
        plain.settimeout(max(0.001, deadline - time.monotonic()))
        return context.wrap_socket(plain, server_hostname=server_name)
    except BaseException:
        plain.close()
        raise


def ask(url: str, request: messages.FromClient) -> tuple[Connection, messages.FromHead]:
    """Send one request to a pool's head and return the answer. The connection stays open."""
    connection = Connection(url)
    try:
        return connection, connection.ask(request)
    except BaseException:
        connection.close()
        raise
