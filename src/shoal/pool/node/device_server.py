"""A device server: owns one device, preloads torch's libraries, and forks one worker per session.

Clients on this machine connect to its Unix socket and pass memory; remote clients connect to its TLS
port (tls_acceptor.py). It keeps the device's ledger: all workers together never have more memory than
the device offers. It stays single-threaded and never computes, so that forking is safe (and, on CUDA,
so that no context exists before the fork).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal.errors import ProtocolError, describe
from shoal.pool.base import limits, log, process
from shoal.pool.node import hardware, reader_process, worker_process
from shoal.pool.node.reader_process import ReaderProcess, ServedData
from shoal.pool.node.spec import DeviceSpec, default_threads, spill
from shoal.pool.node.worker_process import ClientConnection, OfferedDevice, WorkerProcess
from shoal.pool.wire import frames, messages, node_messages, session_messages
from shoal.pool.wire.acceptor import Acceptor, PendingConnection, SelectorLoop

if TYPE_CHECKING:
    from shoal.pool.node.tls_acceptor import TlsAcceptor, TlsConnection

_log = logging.getLogger(__name__)
_NOT_GRANTED = "the lease is not known here: it ended, or was never granted"


@dataclass(eq=False)
class PendingHello(PendingConnection):
    """A local connection that has not shown a token."""

    inbox: frames.Inbox = field(default_factory=lambda: frames.Inbox(fds_max=1))


class DeviceServer:
    """Accepts sessions that the head has granted, until its agent is gone."""

    def __init__(
        self,
        spec: DeviceSpec,
        listener: socket.socket,
        agent: socket.socket,
        network: TlsAcceptor | None = None,
        data: ServedData | None = None,
    ) -> None:
        self._agent = agent
        self._network = network
        self._data = data or ServedData()
        self._inbox = frames.Inbox()
        memory_bytes = spec.memory_bytes or hardware.memory_bytes(spec.device)
        self.device = OfferedDevice(
            spec,
            memory_bytes,
            spec.threads or default_threads(),
            spill(spec, memory_bytes),
            network.identity if network is not None else None,
            bool(self._data.folders),
        )
        self._ready = node_messages.Ready(
            memory_bytes, self.device.threads, hardware.kind(spec), hardware.model(spec)
        )
        self._grants: dict[str, node_messages.Grant] = {}  # by token; used once
        self._workers: dict[int, WorkerProcess] = {}  # by pid, until the worker is reaped
        self._loop = SelectorLoop()
        self._agent_ended = False
        self._acceptor = Acceptor(
            listener,
            self._loop,
            PendingHello,
            lambda pending: self._loop.add_reader(pending.socket, self._hear_hello, pending),
            lambda pending: self._refuse(pending, f"no Hello came within {limits.HELLO_S:g} s"),
            most=limits.GREETINGS_MAX,
            patience_s=limits.HELLO_S,
        )

    def serve(self) -> None:
        """Report to the agent that the device is ready, then serve until the agent ends."""
        try:
            frames.send(self._agent, self._ready)
        except OSError:
            return  # the agent has ended, and the pool with it
        self._loop.add_reader(self._agent, self._hear_agent)
        if self._network is not None:
            self._network.open(self._loop, self)
        while not self._agent_ended:
            self._loop.run_once()
        for worker in self._workers.values():
            worker.kill()

    def _hear_agent(self) -> None:
        try:
            self._agent_ended = not self._inbox.read(self._agent)
        except OSError:
            self._agent_ended = True
            return
        while (message := self._inbox.next(node_messages.TO_SERVER)) is not None:
            match message:
                case node_messages.Grant(token):
                    self._grants[token] = message
                case node_messages.Revoke(session):
                    self._revoke(session)

    def _revoke(self, session: int) -> None:
        self._grants = {t: g for t, g in self._grants.items() if g.session != session}
        for worker in self._workers.values():
            if worker.grant.session == session:
                worker.kill()

    # --- grants ------------------------------------------------------------------------------------

    def _take_grant(self, token: str) -> node_messages.Grant:
        """Use a token up and return its grant. Wait until the grant's memory is free."""
        grant = self._grants.pop(token, None)
        if grant is None:
            raise ProtocolError(_NOT_GRANTED)
        deadline = time.monotonic() + limits.DYING_S
        while self._used_bytes() + grant.memory_bytes > self.device.memory_bytes:
            for worker in list(self._workers.values()):
                if process.has_ended(worker.pidfd):
                    self._reap(worker)
            if time.monotonic() > deadline:
                raise ProtocolError(
                    f"{self.device.spec.name} does not have {grant.memory_bytes} bytes left: sessions "
                    "that ended have not freed their memory yet. Try again."
                )
            time.sleep(0.002)
        return grant

    def _used_bytes(self) -> int:
        return sum(w.grant.memory_bytes for w in self._workers.values())

    # --- clients -----------------------------------------------------------------------------------

    def _hear_hello(self, pending: PendingHello) -> None:
        """Read from a local client; if its token is good, a forked worker takes it over."""
        try:
            alive = pending.inbox.read(pending.socket)
            hello = pending.inbox.next(session_messages.HELLO)
            if hello is not None:
                self._greet(pending.socket, hello, pending.inbox.fds)
            if hello is not None or not alive:
                self._drop(pending)
        except (ProtocolError, OSError) as error:
            self._refuse(pending, str(error))

    def _greet(
        self, connection: socket.socket, hello: session_messages.Hello, fds: Sequence[int]
    ) -> None:
        if len(fds) != 1:
            raise ProtocolError("a session starts with Hello and one descriptor")
        session_messages.check_versions(hello.versions)
        client = ClientConnection(connection, hello.devices, fds[0], hello.host_bytes)
        self._start_worker(client, self._take_grant(hello.token))

    def _refuse(self, pending: PendingHello, reason: str) -> None:
        with suppress(OSError):
            frames.send(pending.socket, messages.refusal(reason))
        self._drop(pending)

    def _drop(self, pending: PendingHello) -> None:
        pending.inbox.close_fds()
        self._acceptor.drop(pending)

    def take_remote_client(
        self, connection: TlsConnection, attach: session_messages.Attach
    ) -> None:
        """Start a worker for a remote client, unless the grant is another's.

        The forked worker inherits the state of TLS and answers; this process forgets it.
        """
        grant = self._grants.get(attach.token)
        wanted = (attach.lease, attach.epoch, connection.peer.name)
        if grant is None or (grant.lease, grant.epoch, grant.client) != wanted:
            raise ProtocolError(_NOT_GRANTED)
        client = ClientConnection(connection.socket, attach.devices)
        self._start_worker(client, self._take_grant(attach.token))

    def _start_worker(self, client: ClientConnection, grant: node_messages.Grant) -> None:
        worker = worker_process.start(self.device, client, grant, self._leave_behind)
        self._workers[worker.pid] = worker
        self._loop.add_reader(worker.pidfd, self._reap, worker)

    def _reap(self, worker: WorkerProcess) -> None:
        """Free the memory of a worker that has ended, and report its end to the agent."""
        if self._workers.pop(worker.pid, None) is None:
            return
        self._loop.remove_reader(worker.pidfd)
        end = worker.reap()
        with suppress(OSError):
            frames.send(
                self._agent,
                node_messages.SessionEnded(worker.grant.session, worker.grant.epoch, end),
            )

    def _worker_with(self, data_id: bytes) -> WorkerProcess | None:
        found = (w for w in self._workers.values() if w.data and w.data.data_id == data_id)
        return next(found, None)

    def take_data_connection(self, data_id: bytes, connection: socket.socket) -> None:
        """Pass a connection to the worker that it names; the worker authenticates it."""
        from shoal import _core

        worker = self._worker_with(data_id)
        if worker is not None and worker.data is not None:
            with suppress(OSError):  # a worker that does not take them gets no more
                passed = [_core.passed_connection()]
                socket.send_fds(worker.data.ours, passed, [connection.fileno()])

    # --- data readers ------------------------------------------------------------------------------

    def take_reader(self, connection: TlsConnection, attach: session_messages.AttachReader) -> None:
        """Start a data reader beside a session's worker, for the session's own client.

        A session has one reader at a time: another starts only after the first has died.
        """
        worker = self._worker_with(attach.data_id)
        if worker is None or worker.data is None:
            raise ProtocolError(reader_process.NO_SESSION)
        reader_process.check(attach, connection.peer.name, worker.grant, worker.data.secret)
        if not self._data.folders:
            raise ProtocolError(reader_process.NO_FOLDERS)
        if worker.reader is not None:
            raise ProtocolError("this session already has a reader on this device")
        worker.readers += 1
        worker.reader = reader_process.start(
            connection.socket, worker.data.ours, worker.readers, self._data, self._leave_behind
        )
        self._loop.add_reader(worker.reader.pidfd, self._reap_reader, worker.reader)

    def _reap_reader(self, reader: ReaderProcess) -> None:
        self._loop.remove_reader(reader.pidfd)
        reader.reap()
        for worker in self._workers.values():
            if worker.reader is reader:
                worker.reader = None

    def _leave_behind(self, but: Collection[object]) -> None:
        """In a forked child: close every descriptor that it does not need."""
        self._agent.close()
        self._loop.close()
        self._acceptor.abandon(but)
        if self._network is not None:
            self._network.abandon(but)
        for worker in self._workers.values():
            worker.close_fds()
            if worker.reader is not None:
                os.close(worker.reader.pidfd)


def main() -> None:
    """Run a device server, for the agent.

    Arguments: SPEC_JSON LISTENER_FD AGENT_FD [TLS_LISTENER_FD IDENTITY SERVED_DATA_JSON].
    """
    # Workers compute on the real device: in them, torch must not know of Shoal's.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    spec_text, listener_fd, agent_fd = sys.argv[1:4]
    process.die_with_parent_thread()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the client's business
    spec = msgspec.json.decode(spec_text, type=DeviceSpec)
    log.set_up(f"device[{spec.name}]")
    listener, agent = (socket.socket(fileno=int(fd)) for fd in (listener_fd, agent_fd))
    try:
        server = _open(spec, listener, agent)
    except Exception as error:  # whatever a driver or library raises: the agent passes it on
        _log.debug("the device server does not start", exc_info=True)
        with suppress(OSError):
            frames.send(agent, messages.refusal(describe(error).rstrip(".")))
        os._exit(1)  # a runtime that failed to start may hang at exit
    server.serve()


def _open(spec: DeviceSpec, listener: socket.socket, agent: socket.socket) -> DeviceServer:
    hardware.load_libraries(spec)
    network = data = None
    if len(sys.argv) == 7:
        from shoal.pool.node import tls_acceptor  # imports ssl, which needs OpenSSL

        data = msgspec.json.decode(sys.argv[6], type=ServedData)
        tls_listener = socket.socket(fileno=int(sys.argv[4]))
        network = tls_acceptor.TlsAcceptor(tls_listener, Path(sys.argv[5]))
    return DeviceServer(spec, listener, agent, network, data)


if __name__ == "__main__":
    main()
