"""A worker process: the device server forks one for each session on its device."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from shoal.errors import ProtocolError
from shoal.pool.base import limits, log, process
from shoal.pool.node.reader_process import ReaderProcess
from shoal.pool.node.spec import DeviceSpec, Spill
from shoal.pool.wire import frames, messages, node_messages, session_messages, tls
from shoal.pool.wire.end_reasons import End, Why, of_signal

if TYPE_CHECKING:
    from shoal import _core


@dataclass(frozen=True)
class OfferedDevice:
    """A device, and how its device server shares it out."""

    spec: DeviceSpec
    memory_bytes: int
    threads: int
    spill: Spill
    identity: tls.Identity | None = None  # of the node; None: workers take no data connections
    serves_data: bool = False


@dataclass
class ClientConnection:
    """An authenticated client, for which the device server starts a worker."""

    connection: socket.socket
    devices: int  # of its lease
    host_fd: int = -1  # of its host region; -1: the client is remote
    host_bytes: int = 0

    @property
    def is_local(self) -> bool:
        return self.host_fd >= 0


@dataclass
class DataChannel:
    """How data connections reach a worker: the device server passes them by a socket pair."""

    data_id: bytes  # with which a data connection names its session
    secret: bytes  # that the client must show on it
    ours: socket.socket
    theirs: socket.socket

    @classmethod
    def open(cls) -> DataChannel:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)  # the device server does not wait for a worker
        return cls(
            secrets.token_bytes(session_messages.DATA_ID_BYTES),
            secrets.token_bytes(session_messages.SECRET_BYTES),
            ours,
            theirs,
        )


@dataclass
class WorkerProcess:
    """A worker and the grant that it serves."""

    grant: node_messages.Grant
    pid: int
    pidfd: int
    last_words_fd: int  # of a pipe that the worker may write to before it ends
    data: DataChannel | None = None
    reader: ReaderProcess | None = None
    readers: int = 0  # that this worker has had
    ordered: bool = False  # the device server killed it

    def kill(self) -> None:
        if not process.has_ended(self.pidfd):  # else it ended for a reason of its own
            self.ordered = True
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> End:
        """Wait for the ended process, close its descriptors, and return why it ended."""
        if self.reader is not None:
            self.reader.kill()  # the device server reaps it when it has ended
        _, status = os.waitpid(self.pid, 0)
        end = self._end(os.waitstatus_to_exitcode(status))
        self.close_fds()
        return end

    def close_fds(self) -> None:
        os.close(self.pidfd)
        os.close(self.last_words_fd)
        if self.data is not None:
            self.data.ours.close()

    def _end(self, status: int) -> End:
        from shoal import _core

        if status == -signal.SIGKILL and self.ordered:
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
        with suppress(OSError):  # the pipe is empty
            words = os.read(self.last_words_fd, limits.LAST_WORDS_BYTES_MAX)
        return End(Why.WORKER_FAILED, words.decode(errors="replace") or f"exit code {status}")


def start(
    device: OfferedDevice,
    client: ClientConnection,
    grant: node_messages.Grant,
    leave_behind: Callable[[Collection[object]], None],
) -> WorkerProcess:
    """Fork a worker, which takes the client's connection over."""
    data = DataChannel.open() if device.identity is not None else None
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    pid = os.fork()
    if pid == 0:
        os.close(read_fd)
        _become_worker(device, client, grant, data, write_fd, leave_behind)
    os.close(write_fd)
    if data is not None:
        data.theirs.close()
    return WorkerProcess(grant, pid, process.watch(pid), read_fd, data)


def _become_worker(
    device: OfferedDevice,
    client: ClientConnection,
    grant: node_messages.Grant,
    data: DataChannel | None,
    last_words_fd: int,
    leave_behind: Callable[[Collection[object]], None],
) -> NoReturn:
    """Serve the session in the forked child, then exit."""
    connection = client.connection
    try:
        process.die_with_parent_thread()
        component = f"worker[{device.spec.name}]"
        log.set_up(component)
        leave_behind((connection,))
        connection.settimeout(limits.SERVER_SEND_S)
        from shoal import _core

        _core.set_up_log(
            component=component,
            json=log.chosen_format() == "json",
            errors_only=log.chosen_level() == "error",
        )
        share = min(1.0, grant.memory_bytes / device.memory_bytes)
        host_spill = int(device.spill.host_bytes * share)
        disk_spill = int(device.spill.disk_bytes * share)
        worker = _core.Worker(
            socket=os.dup(connection.fileno()),
            client_pidfd=_watch_client(client),
            session=grant.session,
            device=device.spec.device,
            name=device.spec.name,
            memory_bytes=grant.memory_bytes,
            host_fd=os.dup(client.host_fd) if client.is_local else -1,
            host_bytes=client.host_bytes,
            spill_host_bytes=host_spill,
            spill_disk_bytes=disk_spill,
            spill_directory=device.spill.directory,
            least_recent=device.spec.paging == "lru",
            speed=device.spec.speed,
            threads=device.threads,
            arrivals=_arrivals(device, client, grant, data),
            last_words_fd=last_words_fd,
        )
        welcome = session_messages.Welcome(
            worker.arena_bytes() if client.is_local else 0,
            os.getpid(),
            # An accelerator's memory is torch's to manage: it does not page yet.
            host_spill + disk_spill if device.spec.device == "cpu" else 0,
            data.data_id if data else b"",
            data.secret if data else b"",
            serves_data=data is not None and device.serves_data,
        )
        frames.send(connection, welcome, worker.fds() if client.is_local else ())
        if client.devices > 1:
            connection.settimeout(limits.PEERS_S)
            add_peers(worker, connection, client.devices)
        connection.close()
        worker.serve()
    except BaseException as error:
        reason = f"the worker of {device.spec.name} did not start: {error}"
        with suppress(OSError):
            os.write(last_words_fd, reason.encode()[: limits.LAST_WORDS_BYTES_MAX])
        with suppress(OSError):
            frames.send(connection, messages.refusal(reason))
    os._exit(1)


def _watch_client(client: ClientConnection) -> int:
    if not client.is_local:
        return -1
    return process.watch(process.peer_credentials(client.connection)[0])


def _arrivals(
    device: OfferedDevice,
    client: ClientConnection,
    grant: node_messages.Grant,
    data: DataChannel | None,
) -> _core.ArrivalsOptions | None:
    """Return who may open data connections to the worker."""
    if data is None or device.identity is None:
        return None
    from shoal import _core

    data.ours.close()
    return _core.ArrivalsOptions(
        channel=data.theirs.detach(),
        key=device.identity.key,
        certificate=device.identity.certificate,
        authority=device.identity.authority,
        secret=data.secret,
        client="" if client.is_local else grant.client,
    )


def add_peers(worker: _core.Worker, connection: socket.socket, devices: int) -> None:
    """Receive the other devices of the lease from the client, and let the worker read them."""
    by_unix = connection.family == socket.AF_UNIX
    fds_max = 3 * min(devices, limits.DEVICES_PER_LEASE_MAX) if by_unix else 0
    message, fds = frames.receive(connection, session_messages.PEERS, fds_max)
    if len(message.devices) != devices:
        raise ProtocolError(
            f"the client named {len(message.devices)} of the lease's {devices} devices"
        )
    for index, peer in enumerate(message.devices):
        if index == message.own:
            worker.add_self(name=peer.name)
            continue
        if peer.remote is not None:
            network = peer.remote.network
            worker.add_remote_peer(
                host=network.host,
                port=network.port,
                server_name=network.server_name,
                data_id=peer.remote.data_id,
                secret=peer.remote.secret,
                member=message.own,
                name=peer.name,
            )
            continue
        count = 3 if peer.arena_bytes else 2
        if len(fds) < count:
            raise ProtocolError("too few descriptors came with Peers")
        worker.add_peer(fds=fds[:count], arena_bytes=peer.arena_bytes, name=peer.name)
        fds = fds[count:]
