"""A device server alone, with this process as agent and head: its grants are what a test makes them."""

from __future__ import annotations

import itertools
import secrets
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from shoal.pool.base import paths
from shoal.pool.base.addresses import LOCAL_PREFIX
from shoal.pool.node.server_process import start_server
from shoal.pool.node.spec import parse_device
from shoal.pool.wire import frames, messages, node_messages
from shoal.pool.wire.profile_messages import SessionProfile


class OneDevice:
    """Gives each client that comes a lease as `grant_bytes` says: (booked, limit) bytes."""

    def __init__(self, spec: str, grant_bytes: Callable[[int], tuple[int, int]]) -> None:
        self.pool = f"one-{secrets.token_hex(8)}"
        self.url = LOCAL_PREFIX + self.pool
        self.profiles: dict[int, SessionProfile] = {}
        self._grant_bytes = grant_bytes
        self._numbers = itertools.count(1)
        self._server = start_server(self.pool, "", 0, parse_device(spec), None)
        ready, _ = frames.receive(self._server.socket, node_messages.FROM_SERVER, 0)
        assert isinstance(ready, node_messages.Ready), ready
        self.memory_bytes = ready.memory_bytes
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(paths.socket_name(self.pool, "head"))
        self._listener.listen(16)
        for work in (self._hear_server, self._accept):
            threading.Thread(target=work, daemon=True).start()

    def _hear_server(self) -> None:
        inbox = frames.Inbox()
        with suppress(OSError):
            while select.select([self._server.socket], [], []) and inbox.read(self._server.socket):
                while (message := inbox.next(node_messages.FROM_SERVER)) is not None:
                    if isinstance(message, SessionProfile):
                        self.profiles[message.session] = message

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        inbox = frames.Inbox()
        session = next(self._numbers)
        with suppress(OSError):
            while select.select([connection], [], []) and inbox.read(connection):
                while (message := inbox.next(messages.FROM_CLIENT)) is not None:
                    match message:
                        case messages.AskLease():
                            frames.send(connection, self._lease(session))
                        case messages.Release():
                            frames.send(connection, messages.Done())
                        case messages.Beat():
                            frames.send(connection, messages.Beat())
        self._send(node_messages.Revoke(session))

    def _lease(self, session: int) -> messages.Lease:
        booked_bytes, limit_bytes = self._grant_bytes(session)
        grant = node_messages.Grant(
            secrets.token_urlsafe(24), session, booked_bytes, session, session, "", limit_bytes
        )
        self._send(grant)
        info = messages.DeviceInfo(
            0, self._server.spec.name, "cpu", grant.most_bytes, grant.most_bytes, 0, 1.0, 1
        )
        device = messages.GrantedDevice(info, self._server.address, grant.token, session)
        return messages.Lease(session, session, [device])

    def order(self, session: int, suspend: bool) -> None:
        self._send(node_messages.OrderSession(session, session, suspend))

    def _send(self, message: node_messages.ToServer) -> None:
        with suppress(OSError):
            frames.send(self._server.socket, message)

    def close(self) -> None:
        self._listener.close()
        self._server.socket.close()
        self._server.process.kill()
        self._server.process.wait()

    def __enter__(self) -> OneDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
