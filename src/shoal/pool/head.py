"""The head of a pool on this machine: starts a device server per device and grants leases.

Never on the data path. It does not import torch, so it is there at once and stays small.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from shoal.errors import ProtocolError
from shoal.pool import messages, process
from shoal.pool.leases import LeaseRefused, LeaseTable
from shoal.pool.server import check_same_user
from shoal.pool.spec import DeviceSpec


def socket_name(pool: str, part: str) -> str:
    """An abstract Unix address: it leaves no file behind. The device servers check who connects."""
    return f"\0shoal/{pool}/{part}"


@dataclass
class Server:
    """A device server, as the head sees it."""

    spec: DeviceSpec
    process: subprocess.Popen[bytes]
    channel: socket.socket
    address: str
    inbox: messages.Inbox = field(default_factory=messages.Inbox)
    ready: messages.Ready | None = None
    ended: bool = False


@dataclass
class Client:
    """A connection, and the lease that lives as long as it."""

    connection: socket.socket
    inbox: messages.Inbox = field(default_factory=messages.Inbox)
    lease: int | None = None
    waiting: messages.AskLease | messages.Describe | None = None  # until the devices are ready
    gone: bool = False  # it does not take its answers


class Head:
    def __init__(self, pool: str, specs: list[DeviceSpec], owner_pidfd: int) -> None:
        self.pool = pool
        self.owner_pidfd = owner_pidfd
        self.table = LeaseTable()
        self.clients: dict[socket.socket, Client] = {}
        self.selector = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(socket_name(pool, "head"))
        self.listener.listen(64)
        self.servers = [self._start(number, spec) for number, spec in enumerate(specs)]

    def _start(self, number: int, spec: DeviceSpec) -> Server:
        address = socket_name(self.pool, f"device-{number}")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(address)
        listener.listen(64)
        ours, theirs = socket.socketpair()
        fds = (listener.fileno(), theirs.fileno())
        command = [sys.executable, "-m", "shoal.pool.server", msgspec.json.encode(spec).decode()]
        # Our own stdout is a pipe that nobody reads after "ready".
        child = subprocess.Popen(
            [*command, *map(str, fds)], pass_fds=fds, stdin=subprocess.DEVNULL, stdout=2
        )
        listener.close()
        theirs.close()
        return Server(spec, child, ours, address)

    def serve(self) -> None:
        """Runs until the owner's process ends."""
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.selector.register(self.owner_pidfd, selectors.EVENT_READ, None)
        for server in self.servers:
            self.selector.register(server.channel, selectors.EVENT_READ, server)
        while True:
            for key, _ in self.selector.select():
                if key.fd == self.owner_pidfd:
                    return
                if isinstance(key.data, Server):
                    self._hear_server(key.data)
                elif isinstance(key.data, Client):
                    self._hear_client(key.data)
                else:
                    self._accept()

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        try:
            check_same_user(connection)
        except ProtocolError:
            connection.close()
            return
        client = Client(connection)
        self.clients[connection] = client
        self.selector.register(connection, selectors.EVENT_READ, client)

    # --- device servers ----------------------------------------------------------------------------

    def _hear_server(self, server: Server) -> None:
        number = self.servers.index(server)
        try:
            alive = server.inbox.read(server.channel)
        except OSError:
            alive = False
        while (message := server.inbox.next()) is not None:
            if isinstance(message, messages.Ready):
                server.ready = message
                self.table.add_device(number, server.spec.name, message.memory_bytes)
        if not alive:
            server.ended = True
            self.selector.unregister(server.channel)
            server.channel.close()
            with suppress(subprocess.TimeoutExpired):
                # It closes its descriptors a little before it ends.
                server.process.wait(timeout=1.0)
            self.table.remove_device(number)
        self._answer_waiting()

    def _starting(self) -> bool:
        return any(s.ready is None and not s.ended for s in self.servers)

    def _answer_waiting(self) -> None:
        if self._starting():
            return
        for client in list(self.clients.values()):
            if client.waiting is not None:
                request, client.waiting = client.waiting, None
                self._answer(client, request)
                if client.gone:
                    self._forget(client)

    # --- clients -----------------------------------------------------------------------------------

    def _hear_client(self, client: Client) -> None:
        try:
            alive = client.inbox.read(client.connection)
            while not client.gone and (message := client.inbox.next()) is not None:
                if not isinstance(message, messages.Describe | messages.AskLease):
                    raise ProtocolError(f"a client does not say {type(message).__name__}")
                if self._starting():
                    client.waiting = message
                else:
                    self._answer(client, message)
        except (ProtocolError, OSError) as error:
            self._reply(client, messages.Refusal(str(error)))
            alive = False
        if not alive or client.gone:
            self._forget(client)

    def _answer(self, client: Client, request: messages.AskLease | messages.Describe) -> None:
        if isinstance(request, messages.Describe):
            infos = [self._info(n) for n in sorted(self.table.devices)]
            return self._reply(client, messages.PoolInfo(infos))
        try:
            self._reply(client, self._grant(client, request))
        except LeaseRefused as refused:
            self._reply(client, messages.Refusal(f"{refused}{self._failures()}"))

    def _grant(self, client: Client, request: messages.AskLease) -> messages.Lease:
        if client.lease is not None:
            raise LeaseRefused("this connection has a lease already")
        granted = self.table.grant(
            request.devices or 1, request.memory_bytes, set(request.sessions_in_use)
        )
        client.lease = granted.lease
        devices = []
        for share in granted.shares:
            server = self.servers[share.device]
            token = secrets.token_urlsafe(24)
            with suppress(OSError):
                messages.send(
                    server.channel, messages.Grant(token, share.session, share.memory_bytes)
                )
            info = msgspec.structs.replace(
                self._info(share.device), memory_bytes=share.memory_bytes
            )
            devices.append(messages.GrantedDevice(info, server.address, token, share.session))
        return messages.Lease(granted.lease, granted.epoch, devices)

    def _info(self, number: int) -> messages.DeviceInfo:
        server, device = self.servers[number], self.table.devices[number]
        return messages.DeviceInfo(
            number=number,
            name=server.spec.name,
            device=server.spec.device,
            memory_bytes=device.memory_bytes,
            free_bytes=device.free_bytes,
            sessions=len(device.granted),
            speed=server.spec.speed,
            threads=server.ready.threads if server.ready else 0,
        )

    def _failures(self) -> str:
        failed = [s for s in self.servers if s.process.poll() is not None]
        return "".join(
            f" Device server {s.spec.name} is not running: "
            f"{process.exit_reason(s.process.returncode)}; its output is above."
            for s in failed
        )

    def _forget(self, client: Client) -> None:
        self.selector.unregister(client.connection)
        del self.clients[client.connection]
        client.connection.close()
        if client.lease is None:
            return
        granted = self.table.release(client.lease)
        for share in granted.shares if granted else ():
            with suppress(OSError):
                messages.send(self.servers[share.device].channel, messages.Revoke(share.session))

    def _reply(self, client: Client, message: messages.Message) -> None:
        # An answer fits the socket's buffer, unless the client does not read: it is not waited for.
        client.connection.setblocking(False)
        try:
            messages.send(client.connection, message)
        except OSError:
            client.gone = True


def main() -> None:
    """`python -m shoal.pool.head POOL OWNER_PID SPECS_JSON`: started by `shoal.up`."""
    pool, owner, specs_text = sys.argv[1:4]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    specs = msgspec.json.decode(specs_text, type=list[DeviceSpec])
    head = Head(pool, specs, process.watch(int(owner)))
    os.write(1, b"ready\n")
    head.serve()


if __name__ == "__main__":
    main()
