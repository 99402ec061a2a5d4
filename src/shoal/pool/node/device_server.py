"""A device server: owns one device, preloads torch's libraries, and forks one worker per session.

Clients on this machine come to its Unix socket and pass memory; those elsewhere come to its door
(door.py), where it listens with TLS. It keeps the device's ledger: all workers together never have
more memory than the device offers. It stays single-threaded and never computes, so that forking is
safe (and, on CUDA, so that no context exists before the fork).
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import secrets
import selectors
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
from shoal.pool.base.folders import Folders
from shoal.pool.node import reader_process
from shoal.pool.node.spec import DeviceSpec, cpu_model, default_threads, host_memory_bytes, spill
from shoal.pool.wire import frames, messages, node_messages
from shoal.pool.wire.end_reasons import End, Why, of_signal

if TYPE_CHECKING:
    from shoal import _core
    from shoal.pool.node import tls_acceptor

_log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 2.0  # a client on this machine has its greeting ready
PEERS_TIMEOUT_S = 30.0  # while the client opens the other devices of its lease, one by one
ANSWER_S = 5.0  # for an answer to leave
GREETINGS_MAX = 64  # connections that have not yet said who they are
LAST_WORDS_BYTES_MAX = 1900
DYING_S = 2.0  # for a killed worker to be gone, so that its memory can be given to another


@dataclass
class Greeting:
    """A connection that has not yet shown a token."""

    deadline: float
    inbox: frames.Inbox = field(default_factory=lambda: frames.Inbox(fds_max=1))


@dataclass
class Session:
    """A worker and the grant that it lives by."""

    grant: node_messages.Grant
    pid: int
    pidfd: int
    data_id: bytes = b""  # by which data connections say that they are for it
    channel: socket.socket | None = None  # by which it gets them
    secret: bytes = b""  # that its client knows
    reader: reader_process.ReaderProcess | None = None
    readers: int = 0  # that it has had
    last_words: int = -1  # a pipe that the worker may write to before it ends
    ordered: bool = False  # we killed it


@dataclass
class Newcomer:
    """A client that a worker is to be started for."""

    connection: socket.socket
    devices: int  # of its lease
    host_fd: int = -1  # of its host region; -1: it is on another machine
    host_bytes: int = 0


class DeviceServer:
    """Accepts sessions that the head has granted, until its agent is gone."""

    def __init__(
        self,
        spec: DeviceSpec,
        listener: socket.socket,
        agent: socket.socket,
        network: tls_acceptor.Door | None = None,
        folders: Folders | None = None,
    ) -> None:
        self.spec = spec
        self.listener = listener
        self.agent = agent
        self.network = network
        self.folders = folders or Folders(())  # that it reads for sessions from elsewhere
        self.inbox = frames.Inbox()
        self.memory_bytes = spec.memory_bytes or device_memory_bytes(spec.device)
        self.threads = spec.threads or default_threads()
        self.spill = spill(spec, self.memory_bytes)
        self.ready = node_messages.Ready(
            self.memory_bytes, self.threads, device_kind(spec), device_hardware(spec)
        )
        self.grants: dict[str, node_messages.Grant] = {}  # by token; used once
        self.sessions: dict[int, Session] = {}  # by pid, until the worker is reaped
        self.selector = selectors.DefaultSelector()
        self.greetings: dict[socket.socket, Greeting] = {}

    def serve(self) -> None:
        try:
            frames.send(self.agent, self.ready)
        except OSError:
            return  # the agent has ended: so has the pool
        self.selector.register(self.agent, selectors.EVENT_READ)
        self.selector.register(self.listener, selectors.EVENT_READ)
        if self.network is not None:
            self.network.open(
                self.selector,
                self.take_network_session,
                self.take_data_connection,
                self.take_reader,
            )
        while True:
            keys = [key for key, _ in self.selector.select(timeout=0.5)]
            ready_now = {key.fileobj for key in keys}
            if self.agent in ready_now and not self._hear_agent():
                break
            if self.listener in ready_now:
                self._accept()
            for connection in ready_now & self.greetings.keys():
                assert isinstance(connection, socket.socket)
                self._hear_greeting(connection)
            for key in keys:
                if isinstance(key.data, Session):
                    self._reap(key.data)
                elif isinstance(key.data, reader_process.ReaderProcess):
                    self._reap_reader(key.data)
            self._drop_late_greetings()
            if self.network is not None:
                self.network.hear(ready_now)
        for session in self.sessions.values():
            session_kill(session)

    def _hear_agent(self) -> bool:
        try:
            alive = self.inbox.read(self.agent)
        except OSError:
            return False
        while (message := self.inbox.next()) is not None:
            if isinstance(message, node_messages.Grant):
                self.grants[message.token] = message
            elif isinstance(message, node_messages.Revoke):
                self.grants = {t: g for t, g in self.grants.items() if g.session != message.session}
                for session in self.sessions.values():
                    if session.grant.session == message.session:
                        session_kill(session)
        return alive

    def take_grant(self, token: str) -> node_messages.Grant:
        """The grant behind a token, which is used up. Its memory is free when this returns."""
        grant = self.grants.pop(token, None)
        if grant is None:
            raise ProtocolError("the lease is not known here: it ended, or was never granted")
        deadline = time.monotonic() + DYING_S
        while self._used_bytes() + grant.memory_bytes > self.memory_bytes:
            for session in list(self.sessions.values()):
                if process.has_ended(session.pidfd):
                    self._reap(session)
            if time.monotonic() > deadline:
                raise ProtocolError(
                    f"{self.spec.name} has no {grant.memory_bytes} bytes left: sessions that ended "
                    "have not let go of theirs yet"
                )
            time.sleep(0.002)
        return grant

    def _used_bytes(self) -> int:
        return sum(s.grant.memory_bytes for s in self.sessions.values())

    def take_network_session(
        self, connection: tls_acceptor.TlsConnection, attach: messages.Attach
    ) -> None:
        """An authenticated connection from another machine: TLS 1.3 is up, the certificate is of our
        pool, and its bearer is the one that the grant is for, with the right lease and epoch.

        The forked worker inherits the state of TLS and answers; this process forgets it.
        """
        grant = self.take_grant(attach.token)
        self._start_worker(Newcomer(connection.socket, attach.devices), grant)

    def take_data_connection(self, data_id: bytes, connection: socket.socket) -> None:
        """Pass a connection to the worker that it is for; nobody has shown anything on it yet."""
        from shoal import _core

        for session in self.sessions.values():
            if session.channel is not None and session.data_id == data_id:
                with suppress(OSError):  # a worker that does not take them gets no more
                    passed = _core.passed_connection()
                    socket.send_fds(session.channel, [passed], [connection.fileno()])

    def take_reader(
        self, connection: tls_acceptor.TlsConnection, attach: messages.AttachReader
    ) -> None:
        """Starts a reader beside the worker of a session, for the session's own client. One at a time:
        another comes only after one that has died."""
        found = (s for s in self.sessions.values() if s.channel and s.data_id == attach.data_id)
        session = next(found, None)
        if session is None:
            raise ProtocolError("the session is not known here: it ended, or is another's")
        reader_process.check(attach, connection.peer.name, session.grant, session.secret)
        if not self.folders:
            raise ProtocolError(reader_process.NO_FOLDERS)
        if session.reader is not None:
            raise ProtocolError("this session has a reader on this device already")
        assert session.channel is not None
        session.readers += 1
        session.reader = reader_process.start(
            connection.socket, session.channel, session.readers, self.folders, self._leave_behind
        )
        self.selector.register(session.reader.pidfd, selectors.EVENT_READ, session.reader)

    def _reap_reader(self, reader: reader_process.ReaderProcess) -> None:
        self.selector.unregister(reader.pidfd)
        reader.reap()
        for session in self.sessions.values():
            if session.reader is reader:
                session.reader = None

    def grant_for(self, attach: messages.Attach, client: str) -> node_messages.Grant:
        """The grant that `attach` is for, without using it up; refused if it is not that client's."""
        grant = self.grants.get(attach.token)
        same = grant is not None and (grant.lease, grant.epoch) == (attach.lease, attach.epoch)
        if grant is None or not same or grant.client != client:
            raise ProtocolError("the lease is not known here: it ended, or was never granted")
        return grant

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
            process.check_same_user(connection)
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
        newcomer = Newcomer(connection, hello.devices, fds[0], hello.host_bytes)
        self._start_worker(newcomer, self.take_grant(hello.token))

    def _start_worker(self, newcomer: Newcomer, grant: node_messages.Grant) -> None:
        arrivals = Arrivals.new() if self.network is not None else None
        listen_fd, speak_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        pid = os.fork()
        if pid == 0:
            os.close(listen_fd)
            self._become_worker(newcomer, grant, arrivals, speak_fd)
        os.close(speak_fd)
        session = Session(grant, pid, process.watch(pid), last_words=listen_fd)
        if arrivals is not None:
            arrivals.theirs.close()
            session.data_id, session.channel = arrivals.data_id, arrivals.ours
            session.secret = arrivals.secret
        self.sessions[pid] = session
        self.selector.register(session.pidfd, selectors.EVENT_READ, session)

    def _end_greeting(self, connection: socket.socket, refusal: str = "") -> None:
        greeting = self.greetings.pop(connection)
        self.selector.unregister(connection)
        if refusal:
            with suppress(OSError):
                frames.send(connection, messages.Refusal(refusal))
        greeting.inbox.close_fds()
        connection.close()

    def _drop_late_greetings(self) -> None:
        now = time.monotonic()
        for connection in [c for c, g in self.greetings.items() if g.deadline < now]:
            self._end_greeting(connection, f"no Hello came within {HELLO_TIMEOUT_S} s")

    def _become_worker(
        self,
        newcomer: Newcomer,
        grant: node_messages.Grant,
        arrivals: Arrivals | None,
        last_words_fd: int,
    ) -> None:
        """Runs in the forked child and never returns."""
        connection = newcomer.connection
        try:
            process.die_with_parent_thread()
            component = f"worker[{self.spec.name}]"
            log.set_up(component)
            self._leave_behind((connection,))
            connection.settimeout(ANSWER_S)
            from shoal import _core

            _core.set_up_log(
                component=component,
                json=log.chosen_format() == "json",
                errors_only=log.chosen_level() == "error",
            )
            client_pidfd = -1
            if newcomer.host_fd >= 0:
                client_pidfd = process.watch(process.peer_credentials(connection)[0])
            share = min(1.0, grant.memory_bytes / self.memory_bytes)
            host_spill = int(self.spill.host_bytes * share)
            disk_spill = int(self.spill.disk_bytes * share)
            worker = _core.Worker(
                socket=os.dup(connection.fileno()),
                client_pidfd=client_pidfd,
                session=grant.session,
                device=self.spec.device,
                name=self.spec.name,
                memory_bytes=grant.memory_bytes,
                host_fd=os.dup(newcomer.host_fd) if newcomer.host_fd >= 0 else -1,
                host_bytes=newcomer.host_bytes,
                spill_host_bytes=host_spill,
                spill_disk_bytes=disk_spill,
                spill_directory=self.spill.directory,
                least_recent=self.spec.paging == "lru",
                speed=self.spec.speed,
                threads=self.threads,
                arrivals=self._open_arrivals(newcomer, grant, arrivals),
                last_words_fd=last_words_fd,
            )
            # An accelerator's memory is torch's to manage: it does not page yet.
            spill_bytes = host_spill + disk_spill if self.spec.device == "cpu" else 0
            here = newcomer.host_fd >= 0
            welcome = messages.Welcome(
                worker.arena_bytes() if here else 0,
                os.getpid(),
                spill_bytes,
                arrivals.data_id if arrivals else b"",
                arrivals.secret if arrivals else b"",
                serves_data=bool(arrivals and self.folders),
            )
            frames.send(connection, welcome, worker.fds() if here else ())
            if newcomer.devices > 1:
                connection.settimeout(PEERS_TIMEOUT_S)
                add_peers(worker, connection, newcomer.devices)
            connection.close()
            worker.serve()
        except BaseException as error:
            reason = f"the worker of {self.spec.name} did not start: {error}"
            with suppress(OSError):
                os.write(last_words_fd, reason.encode()[:LAST_WORDS_BYTES_MAX])
            with suppress(OSError):
                frames.send(connection, messages.Refusal(reason))
        os._exit(1)

    def _leave_behind(self, but: Collection[object]) -> None:
        """In a forked child: lets go of everything that it does not need."""
        self.listener.close()
        self.agent.close()
        self.selector.close()
        if self.network is not None:
            self.network.close(but)
        for session in self.sessions.values():
            os.close(session.pidfd)
            os.close(session.last_words)
            if session.channel is not None:
                session.channel.close()
            if session.reader is not None:
                os.close(session.reader.pidfd)
        for other in self.greetings.keys() - set(but):
            other.close()

    def _open_arrivals(
        self, newcomer: Newcomer, grant: node_messages.Grant, arrivals: Arrivals | None
    ) -> _core.Arrivals | None:
        if arrivals is None or self.network is None:
            return None
        from shoal import _core

        arrivals.ours.close()
        identity = self.network.identity
        return _core.Arrivals(
            channel=arrivals.theirs.detach(),
            key=identity.key,
            certificate=identity.certificate,
            authority=identity.authority,
            secret=arrivals.secret,
            client=grant.client if newcomer.host_fd < 0 else "",
        )

    def _reap(self, session: Session) -> None:
        """Its process has ended: the memory is free, and the head is told."""
        if self.sessions.pop(session.pid, None) is None:
            return
        self.selector.unregister(session.pidfd)
        os.close(session.pidfd)
        if session.channel is not None:
            session.channel.close()
        if session.reader is not None:
            session.reader.kill()  # it is reaped when it has ended
        _, status = os.waitpid(session.pid, 0)
        end = session_end(session, os.waitstatus_to_exitcode(status))
        os.close(session.last_words)
        grant = session.grant
        with suppress(OSError):
            frames.send(self.agent, node_messages.SessionEnded(grant.session, grant.epoch, end))


@dataclass
class Arrivals:
    """How data connections get to a worker, and what they must show there."""

    data_id: bytes
    secret: bytes
    ours: socket.socket
    theirs: socket.socket

    @classmethod
    def new(cls) -> Arrivals:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)  # the device server waits for nobody
        return cls(
            secrets.token_bytes(messages.DATA_ID_BYTES),
            secrets.token_bytes(messages.SECRET_BYTES),
            ours,
            theirs,
        )


def session_end(session: Session, status: int) -> End:
    """Why a worker ended, by its exit code or signal."""
    from shoal import _core

    if status == -signal.SIGKILL and session.ordered:
        return End(Why.ORDERED)
    if status < 0:
        return of_signal(-status)
    by_client = {
        _core.EXIT_CLIENT_ENDED: Why.CLIENT_ENDED,
        _core.EXIT_CLIENT_CLOSED: Why.CLIENT_CLOSED,
        _core.EXIT_CLIENT_SILENT: Why.CUT,
    }
    if status in by_client:
        return End(by_client[status])
    words = b""
    with suppress(OSError):  # it said nothing
        words = os.read(session.last_words, LAST_WORDS_BYTES_MAX)
    return End(Why.WORKER_FAILED, words.decode(errors="replace") or f"exit code {status}")


def session_kill(session: Session) -> None:
    if not process.has_ended(session.pidfd):  # else it has a reason of its own
        session.ordered = True
    with suppress(ProcessLookupError):
        os.kill(session.pid, signal.SIGKILL)


def add_peers(worker: _core.Worker, connection: socket.socket, devices: int) -> None:
    """Hears from the client which other devices its lease has, and lets the worker read them."""
    by_unix = connection.family == socket.AF_UNIX
    fds_max = 3 * min(devices, limits.DEVICES_PER_LEASE_MAX) if by_unix else 0
    message, fds = frames.receive(connection, fds_max)
    if not isinstance(message, messages.Peers) or len(message.devices) != devices:
        raise ProtocolError(f"a lease of {devices} devices says so with Peers")
    for place, peer in enumerate(message.devices):
        if place == message.own:
            worker.add_self(name=peer.name)
            continue
        if peer.elsewhere is not None:
            network = peer.elsewhere.network
            worker.add_peer_elsewhere(
                host=network.host,
                port=network.port,
                server_name=network.server_name,
                data_id=peer.elsewhere.data_id,
                secret=peer.elsewhere.secret,
                member=message.own,
                name=peer.name,
            )
            continue
        count = 3 if peer.arena_bytes else 2
        if len(fds) < count:
            raise ProtocolError("too few descriptors came with Peers")
        worker.add_peer(fds=fds[:count], arena_bytes=peer.arena_bytes, name=peer.name)
        fds = fds[count:]


def device_memory_bytes(device: str) -> int:
    """All the memory that a device has to give."""
    if device == "cpu":
        return host_memory_bytes() * 8 // 10
    import torch

    index = torch.device(device).index or 0
    module = torch.get_device_module(torch.device(device))
    return int(module.get_device_properties(index).total_memory)


def device_kind(spec: DeviceSpec) -> str:
    """What `kind=` of a request is looked for in."""
    if spec.kind or spec.device == "cpu":
        return spec.kind or "cpu"
    return device_hardware(spec)


def device_hardware(spec: DeviceSpec) -> str:
    """What the device calls itself."""
    if spec.device == "cpu":
        return cpu_model()[:64]
    import torch

    module = torch.get_device_module(torch.device(spec.device))
    return str(module.get_device_name(torch.device(spec.device).index or 0))[:64]


def _load_core(spec: DeviceSpec) -> None:
    """Loads what the workers compute with, so that each starts with it when it is forked.

    That is torch's libraries. A CPU device does without torch's Python package, whose import takes
    two seconds: a pool starts, and is back after a fault, that much sooner.
    """
    if spec.device == "cpu":
        found = importlib.util.find_spec("torch")
        if found is None or found.origin is None:
            raise ModuleNotFoundError("torch is missing. Type: pip install torch==2.13.0")
        for name in ("libtorch_global_deps.so", "libtorch_python.so"):
            ctypes.CDLL(str(Path(found.origin).parent / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    else:
        import torch  # noqa: F401

    from shoal import _core  # noqa: F401


def main() -> None:
    """Run a device server, for the agent.

    Arguments: SPEC_JSON LISTENER_FD AGENT_FD [DOOR_FD IDENTITY FOLDERS_JSON].
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
        os._exit(1)  # a runtime that did not start may not end well either
    server.serve()


def _open(spec: DeviceSpec, listener: socket.socket, agent: socket.socket) -> DeviceServer:
    _load_core(spec)
    network, folders = None, Folders(())
    if len(sys.argv) == 7:
        from shoal.pool.node import tls_acceptor  # and TLS with it, which needs OpenSSL

        folders = Folders(msgspec.json.decode(sys.argv[6], type=list[str]))
        network = tls_acceptor.Door(socket.socket(fileno=int(sys.argv[4])), Path(sys.argv[5]))
    server = DeviceServer(spec, listener, agent, network, folders)
    if network is not None:
        network.check = server.grant_for
    return server


if __name__ == "__main__":
    main()
