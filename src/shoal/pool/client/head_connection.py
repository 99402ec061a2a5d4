"""A client's connection to a head: which pool, one request and its answer, and keeping a lease."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from shoal.errors import LeaseError, PoolError, ProtocolError
from shoal.pool.base import limits, paths
from shoal.pool.base.process import check_same_user
from shoal.pool.wire import frames, messages, tls

if TYPE_CHECKING:
    import ssl

LOCAL_PREFIX = "shoal+local://"
NETWORK_PREFIX = "shoal://"


def split_address(text: str, default_port: int = limits.PORT) -> tuple[str, int]:
    """Host and port of "host", "host:7433" or "[::1]:7433".

    >>> split_address("10.0.0.1:80")
    ('10.0.0.1', 80)
    """
    host, port = text, str(default_port)
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif text.count(":") == 1:
        host, port = text.split(":")
    if not host or not port.isdecimal() or not 0 <= int(port) < 65536 or len(host) > 255:
        raise PoolError(f"{text!r} is no address; write for example 10.0.0.1 or host:{limits.PORT}")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def default_url() -> str | None:
    """The pool to use where none is named: $SHOAL_POOL, else the one that was joined."""
    named = os.environ.get("SHOAL_POOL")
    if named:
        return named
    if not os.path.exists(paths.identity_file()):
        return None
    identity = tls.default_identity()
    return identity.url if identity is not None else None


class Connection:
    """A framed connection to a head. Waits as long as `timeout_s` allows, and never longer."""

    def __init__(self, url: str, timeout_s: float = limits.ANSWER_S) -> None:
        self.url = url
        self.host = ""  # at which a head on the network was reached
        self._inbox = frames.Inbox(frame_bytes_max=limits.ANSWER_BYTES_MAX)
        try:
            self.socket = self._open(timeout_s)
        except (OSError, ProtocolError) as error:
            raise LeaseError(_unreachable(url, error)) from None

    def _open(self, timeout_s: float) -> socket.socket:
        if self.url.startswith(LOCAL_PREFIX):
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                local.settimeout(timeout_s)
                local.connect(paths.socket_name(self.url.removeprefix(LOCAL_PREFIX), "head"))
                check_same_user(local)
            except BaseException:
                local.close()
                raise
            return local
        if self.url.startswith(NETWORK_PREFIX):
            self.host, port = split_address(self.url.removeprefix(NETWORK_PREFIX))
            return open_tls(self.host, port, identity_for(self.url), "head.shoal", timeout_s)
        raise LeaseError(
            f"{self.url!r} is no pool that this version can reach; a pool on this machine is named "
            f"like {LOCAL_PREFIX}… (see the url of shoal.up()), one elsewhere {NETWORK_PREFIX}HOST:PORT"
        )

    def send(self, message: messages.Message) -> None:
        try:
            frames.send(self.socket, message)
        except OSError as error:
            raise ProtocolError(f"the connection broke: {error}") from None

    def buffered(self) -> messages.Message | None:
        """A message that has come already."""
        return self._inbox.next()

    def receive(self, timeout_s: float) -> messages.Message:
        """The next message; ProtocolError if it does not come in time."""
        deadline = time.monotonic() + timeout_s
        try:
            while (message := self._inbox.next()) is None:
                self.socket.settimeout(max(0.001, deadline - time.monotonic()))
                if not self._inbox.read(self.socket):
                    raise ProtocolError("the head closed the connection")
        except TimeoutError:
            raise Silence from None
        except OSError as error:
            raise ProtocolError(f"the connection broke: {error}") from None
        return message

    def ask(
        self, request: messages.Message, timeout_s: float = limits.ANSWER_S
    ) -> messages.Message:
        """The answer to one request; LeaseError if it is a refusal or does not come."""
        try:
            self.send(request)
            answer = self.receive(timeout_s)
        except ProtocolError as error:
            raise LeaseError(_unreachable(self.url, error)) from None
        if isinstance(answer, messages.Refusal):
            raise LeaseError(answer.reason)
        return answer

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Silence(ProtocolError):
    """Nothing came in time; the connection is still good."""

    def __init__(self) -> None:
        super().__init__("the head did not answer in time")


def identity_for(url: str) -> tls.Identity:
    """The identity with which this user goes to that pool."""
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
    """A connection to a server of the pool that proves to be `server_name`."""
    context = tls.client_context(identity)
    deadline = time.monotonic() + min(timeout_s, limits.CONNECT_S)
    plain = socket.create_connection((host, port), timeout=min(timeout_s, limits.CONNECT_S))
    try:
        plain.settimeout(max(0.001, deadline - time.monotonic()))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return context.wrap_socket(plain, server_hostname=server_name)
    except BaseException:
        plain.close()
        raise


def _unreachable(url: str, error: Exception) -> str:
    problem = tls.certificate_problem(error)
    if problem is not None:
        return f"the pool {url} cannot be used: {problem}."
    unlike = getattr(error, "verify_message", None)  # of an ssl.SSLCertVerificationError
    if unlike:
        return (
            f"the pool {url} is not the one that was joined: {unlike}. If it was set up "
            "anew, join it again: shoal join CODE@HOST"
        )
    help_text = "Type: shoal doctor"
    if url.startswith(LOCAL_PREFIX):
        help_text = "Is the program that started it still running?"
        if os.environ.get("SHOAL_POOL") == url:
            help_text += " Unset SHOAL_POOL to use a pool of this program's own."
    return f"the pool {url} cannot be reached: {error}. {help_text}"


def ask(url: str, request: messages.Message) -> tuple[Connection, messages.Message]:
    """Sends one request to a pool's head and waits for the answer. The connection stays open."""
    connection = Connection(url)
    try:
        return connection, connection.ask(request)
    except BaseException:
        connection.close()
        raise
