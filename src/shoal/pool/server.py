"""A device server: owns one device, preloads torch, and forks one worker per session.

It stays single-threaded and never computes, so that forking is safe (and, on CUDA, so that no
context exists before the fork).
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from shoal.errors import ProtocolError
from shoal.pool import messages, process
from shoal.pool.spec import DeviceSpec, default_threads, host_memory_bytes, spill

if TYPE_CHECKING:
    from shoal import _core

HELLO_TIMEOUT_S = 2.0  # a client on this machine has its greeting ready
DEVICES_MAX = 32  # of one lease
GREETINGS_MAX = 64  # connections that have not yet said who they are


@dataclass
class Greeting:
    """A connection that has not yet shown a token."""

    deadline: float
    inbox: messages.Inbox = field(default_factory=lambda: messages.Inbox(fds_max=1))


class DeviceServer:
    """Accepts sessions that the head has granted, until the head is gone."""

    def __init__(self, spec: DeviceSpec, listener: socket.socket, head: socket.socket) -> None:
        self.spec = spec
        self.listener = listener
        self.head = head
        self.inbox = messages.Inbox()
        self.memory_bytes = spec.memory_bytes or device_memory_bytes(spec.device)
        self.threads = spec.threads or default_threads()
        self.spill = spill(spec, self.memory_bytes)
        self.grants: dict[str, messages.Grant] = {}  # by token; used once
        self.workers: dict[int, int] = {}  # session -> pid
        self.selector = selectors.DefaultSelector()
        self.greetings: dict[socket.socket, Greeting] = {}

    def serve(self) -> None:
        messages.send(self.head, messages.Ready(self.memory_bytes, self.threads))
        self.selector.register(self.head, selectors.EVENT_READ)
        self.selector.register(self.listener, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in self.selector.select(timeout=0.5)}
            if self.head in ready and not self._hear_head():
                break
            if self.listener in ready:
                self._accept()
            for connection in ready & self.greetings.keys():
                assert isinstance(connection, socket.socket)
                self._hear_greeting(connection)
            self._drop_late_greetings()
            self._reap()
        for pid in self.workers.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _hear_head(self) -> bool:
        try:
            alive = self.inbox.read(self.head)
        except OSError:
            return False
        while (message := self.inbox.next()) is not None:
            if isinstance(message, messages.Grant):
                self.grants[message.token] = message
            elif isinstance(message, messages.Revoke):
                self.grants = {t: g for t, g in self.grants.items() if g.session != message.session}
                pid = self.workers.get(message.session)
                if pid is not None:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        return alive

    # --- greetings: nobody is waited for, so that a slow or silent client delays nobody else ---------

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        connection.setblocking(False)
        self.greetings[connection] = Greeting(time.monotonic() + HELLO_TIMEOUT_S)
        self.selector.register(connection, selectors.EVENT_READ)
        if len(self.greetings) > GREETINGS_MAX:
            self._end_greeting(next(iter(self.greetings)), "too many clients connect at once")

    def _hear_greeting(self, connection: socket.socket) -> None:
        """Reads what a client has said; if its token is good, a forked worker takes it over."""
        inbox = self.greetings[connection].inbox
        try:
            check_same_user(connection)
            alive = inbox.read(connection)
            hello = inbox.next()
            if hello is not None:
                self._greet(connection, hello, inbox.fds)
            if hello is not None or not alive:
                self._end_greeting(connection)
        except (ProtocolError, OSError) as error:
            self._end_greeting(connection, str(error))

    def _greet(
        self, connection: socket.socket, hello: messages.Message, fds: Sequence[int]
    ) -> None:
        if not isinstance(hello, messages.Hello) or len(fds) != 1:
            raise ProtocolError("a session starts with Hello and one descriptor")
        problem = messages.version_mismatch(hello.versions, messages.our_versions())
        if problem:
            raise ProtocolError(problem)
        grant = self.grants.pop(hello.token, None)
        if grant is None:
            raise ProtocolError("the lease is not known here: it ended, or was never granted")
        pid = os.fork()
        if pid == 0:
            self._become_worker(connection, hello, fds[0], grant)
        self.workers[grant.session] = pid

    def _end_greeting(self, connection: socket.socket, refusal: str = "") -> None:
        greeting = self.greetings.pop(connection)
        self.selector.unregister(connection)
        if refusal:
            with suppress(OSError):
                messages.send(connection, messages.Refusal(refusal))
        greeting.inbox.close_fds()
        connection.close()

    def _drop_late_greetings(self) -> None:
        now = time.monotonic()
        for connection in [c for c, g in self.greetings.items() if g.deadline < now]:
            self._end_greeting(connection, f"no Hello came within {HELLO_TIMEOUT_S} s")

    def _become_worker(
        self, connection: socket.socket, hello: messages.Hello, host_fd: int, grant: messages.Grant
    ) -> None:
        """Runs in the forked child and never returns."""
        try:
            process.die_with_parent_thread()
            self.listener.close()
            self.head.close()
            self.selector.close()
            for other in self.greetings.keys() - {connection}:
                other.close()
            connection.settimeout(None)
            from shoal import _core

            share = min(1.0, grant.memory_bytes / self.memory_bytes)
            host_spill = int(self.spill.host_bytes * share)
            disk_spill = int(self.spill.disk_bytes * share)
            worker = _core.Worker(
                socket=os.dup(connection.fileno()),
                client_pidfd=process.watch(peer_credentials(connection)[0]),
                session=grant.session,
                device=self.spec.device,
                name=self.spec.name,
                memory_bytes=grant.memory_bytes,
                host_fd=os.dup(host_fd),
                host_bytes=hello.host_bytes,
                spill_host_bytes=host_spill,
                spill_disk_bytes=disk_spill,
                spill_directory=self.spill.directory,
                least_recent=self.spec.paging == "lru",
                speed=self.spec.speed,
                threads=self.threads,
            )
            # An accelerator's memory is torch's to manage: it does not page yet.
            spill_bytes = host_spill + disk_spill if self.spec.device == "cpu" else 0
            welcome = messages.Welcome(worker.arena_bytes(), os.getpid(), spill_bytes)
            messages.send(connection, welcome, worker.fds())
            if hello.devices > 1:
                connection.settimeout(HELLO_TIMEOUT_S)
                add_peers(worker, connection, hello.devices)
            connection.close()
            worker.serve()
        except BaseException as error:
            with suppress(OSError):
                reason = f"the worker of {self.spec.name} did not start: {error}"
                messages.send(connection, messages.Refusal(reason))
        os._exit(1)

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self.workers = {s: p for s, p in self.workers.items() if p != pid}


def add_peers(worker: _core.Worker, connection: socket.socket, devices: int) -> None:
    """Hears from the client which other devices its lease has, and lets the worker read them."""
    message, fds = messages.receive(connection, fds_max=3 * min(devices, DEVICES_MAX))
    if not isinstance(message, messages.Peers) or len(message.devices) != devices:
        raise ProtocolError(f"a lease of {devices} devices says so with Peers")
    for peer in message.devices:
        count = 3 if peer.arena_bytes else 2
        if len(fds) < count:
            raise ProtocolError("too few descriptors came with Peers")
        worker.add_peer(fds=fds[:count], arena_bytes=peer.arena_bytes, name=peer.name)
        fds = fds[count:]


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket, as the kernel knows them."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", data)
    return pid, uid


def check_same_user(connection: socket.socket) -> None:
    """Sockets of a pool on one machine are for the user who started it."""
    _, uid = peer_credentials(connection)
    if uid not in (os.getuid(), 0):
        raise ProtocolError("this pool belongs to another user of the machine")


def device_memory_bytes(device: str) -> int:
    """All the memory that a device has to give."""
    if device == "cpu":
        return host_memory_bytes() * 8 // 10
    import torch

    index = torch.device(device).index or 0
    module = torch.get_device_module(torch.device(device))
    return int(module.get_device_properties(index).total_memory)


def main() -> None:
    """`python -m shoal.pool.server SPEC_JSON LISTENER_FD HEAD_FD`: started by the head."""
    spec_text, listener_fd, head_fd = sys.argv[1:4]
    process.die_with_parent_thread()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the client's business
    spec = msgspec.json.decode(spec_text, type=DeviceSpec)
    import torch  # noqa: F401  (preloaded: each forked worker starts with it)

    from shoal import _core  # noqa: F401

    server = DeviceServer(
        spec, socket.socket(fileno=int(listener_fd)), socket.socket(fileno=int(head_fd))
    )
    server.serve()


if __name__ == "__main__":
    main()
