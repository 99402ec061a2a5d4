"""A device server: owns one device, and starts one worker per session.

Clients on this machine connect to its Unix socket and pass memory; remote clients connect to its TLS
port (tls_acceptor.py). It keeps the device's ledger: all workers together never have more memory than
the device offers. It holds the keys and secrets; the processes that it starts are children of its fork
server (fork_server.py), which has none. It never computes, and never touches the device's runtime.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal.errors import ProtocolError, describe
from shoal.pool.base import limits, log, process
from shoal.pool.node import (
    child_main,
    fork_server,
    hardware,
    orders,
    reader_process,
    worker_process,
)
from shoal.pool.node.fork_server import ForkServer
from shoal.pool.node.reader_process import ReaderProcess, ServedData
from shoal.pool.node.session_control import Sessions
from shoal.pool.node.spec import DeviceSpec, default_threads, spill
from shoal.pool.node.worker_process import ClientConnection, WorkerProcess
from shoal.pool.wire import (
    frames,
    messages,
    node_messages,
    profile_messages,
    session_messages,
    tls,
)
from shoal.pool.wire.acceptor import Acceptor, PendingConnection, SelectorLoop
from shoal.units import show_bytes

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
        forks: ForkServer,
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
        self._forks = forks
        facts = hardware.facts(spec, forks)
        memory_bytes = hardware.offered_bytes(spec, facts)
        self.device = orders.DeviceOffer(
            spec, memory_bytes, spec.threads or default_threads(), spill(spec, memory_bytes)
        )
        pages = spec.device == "cpu"
        swap_bytes = self.device.spill.host_bytes + self.device.spill.disk_bytes
        self._ready = node_messages.Ready(
            memory_bytes,
            self.device.threads,
            hardware.kind(spec, facts),
            facts.name,
            facts.context_bytes,
            facts.capability,
            elastic=pages and swap_bytes > 0,
            uuid=facts.uuid,
        )
        self._grants: dict[str, node_messages.Grant] = {}  # by token; used once
        self._workers: dict[int, WorkerProcess] = {}  # by pidfd, until the worker is reaped
        self._loop = SelectorLoop()
        self._sessions = Sessions(
            memory_bytes,
            self.device.spill,
            spec.host_bytes is not None,
            pages=pages,
            loop=self._loop,
            send=self._send_profile,
            context_bytes=facts.context_bytes,
        )
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
        self._loop.add_reader(self._forks, self._lose_forks)
        if self._network is not None:
            self._network.open(self._loop, self)
        while not self._agent_ended:
            self._loop.run_once()
        for worker in self._workers.values():
            worker.kill()

    def _lose_forks(self) -> None:
        raise fork_server.Lost("the fork server has ended")

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
                case node_messages.OrderSession() as order:
                    self._sessions.obey(order)

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
        while self._sessions.booked_bytes() + grant.memory_bytes > self.device.memory_bytes:
            for worker in list(self._workers.values()):
                if process.has_ended(worker.pidfd):
                    self._reap(worker)
            if time.monotonic() > deadline:
                raise ProtocolError(
                    f"{self.device.spec.name} does not have {show_bytes(grant.memory_bytes)} left: "
                    "sessions that ended have not freed their memory yet. Try again."
                )
            time.sleep(0.002)
        return grant

    def _send_profile(self, profile: profile_messages.SessionProfile) -> None:
        with suppress(OSError):  # the agent has ended, and this process with it
            frames.send(self._agent, profile)

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
        """Start a worker for a remote client, unless the grant is another's."""
        grant = self._grants.get(attach.token)
        wanted = (attach.lease, attach.epoch, connection.peer.name)
        if grant is None or (grant.lease, grant.epoch, grant.client) != wanted:
            raise ProtocolError(_NOT_GRANTED)
        client = ClientConnection(connection.socket, attach.devices)
        worker = self._start_worker(client, self._take_grant(attach.token))
        self._await_vouch(worker, connection)

    def _start_worker(self, client: ClientConnection, grant: node_messages.Grant) -> WorkerProcess:
        authority = self._network.identity.authority if self._network is not None else None
        serves_data = bool(self._data.folders)
        control = self._sessions.open(grant)
        try:
            worker = worker_process.start(
                self._forks, self.device, client, control, authority, serves_data
            )
        except BaseException:
            self._sessions.close(control)
            raise
        self._workers[worker.pidfd] = worker
        self._loop.add_reader(worker.pidfd, self._reap, worker)
        return worker

    def _await_vouch(
        self, process: WorkerProcess | ReaderProcess, connection: TlsConnection
    ) -> None:
        """Hand a remote client's connection over as soon as the new process shows its certificate."""
        process.handing_over = connection
        self._loop.add_reader(process.child.line, self._hand_over, process)

    def _hand_over(self, process: WorkerProcess | ReaderProcess) -> None:
        self._loop.remove_reader(process.child.line)
        connection, process.handing_over = process.handing_over, None
        assert connection is not None
        try:
            process.child.line.settimeout(limits.SERVER_SEND_S)  # the whole message has been sent
            answer, _ = frames.receive(process.child.line, orders.FROM_CHILD)
        except ProtocolError:
            answer = orders.Failed("it ended before it began")
        if isinstance(answer, orders.Vouch):
            connection.hand_over(answer.certificate)
            return
        with suppress(OSError):
            connection.socket.send(
                frames.encode(messages.refusal(f"the device's process: {answer}"))
            )
        connection.socket.close()

    def _reap(self, worker: WorkerProcess) -> None:
        """Free the memory of a worker that has ended, and report its end to the agent."""
        if self._workers.pop(worker.pidfd, None) is None:
            return
        self._loop.remove_reader(worker.pidfd)
        self._loop.remove_reader(worker.child.line)
        end = worker.reap(self._forks)
        self._sessions.close(worker.control)
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
        assert self._network is not None
        worker.reader = reader_process.start(
            self._forks,
            connection,
            worker.data.ours,
            worker.readers,
            self._data,
            self._network.identity.authority,
        )
        self._loop.add_reader(worker.reader.child.pidfd, self._reap_reader, worker.reader)
        self._await_vouch(worker.reader, connection)

    def _reap_reader(self, reader: ReaderProcess) -> None:
        self._loop.remove_reader(reader.child.pidfd)
        self._loop.remove_reader(reader.child.line)
        reader.reap(self._forks)
        for worker in self._workers.values():
            if worker.reader is reader:
                worker.reader = None


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
        os._exit(1)
    try:
        server.serve()
    except fork_server.Lost as error:  # its children have ended with it
        _log.error("%s", error)
        os._exit(1)


def _open(spec: DeviceSpec, listener: socket.socket, agent: socket.socket) -> DeviceServer:
    tls_listener = socket.socket(fileno=int(sys.argv[4])) if len(sys.argv) == 7 else None
    if tls_listener is not None:
        tls.library()  # the children speak TLS, too
    hardware.load_libraries(spec)
    mine = [listener, agent] if tls_listener is None else [listener, agent, tls_listener]
    forks = fork_server.start(child_main.run, mine)
    process.hide_memory()
    network = data = None  # whatever follows is unknown to the children
    if tls_listener is not None:
        from shoal.pool.node import tls_acceptor  # imports ssl, which needs OpenSSL

        data = msgspec.json.decode(sys.argv[6], type=ServedData)
        network = tls_acceptor.TlsAcceptor(tls_listener, Path(sys.argv[5]))
    return DeviceServer(forks, spec, listener, agent, network, data)


if __name__ == "__main__":
    main()
