"""A worker process, as its device server sees it: how it starts, is killed and ended."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.pool.base import limits, process
from shoal.pool.node import orders
from shoal.pool.node.fork_server import Child, ForkServer
from shoal.pool.node.reader_process import ReaderProcess
from shoal.pool.node.session_control import SessionControl
from shoal.pool.wire import frames, node_messages, session_messages
from shoal.pool.wire.end_reasons import End, Why, of_signal

if TYPE_CHECKING:
    from shoal.pool.node.tls_acceptor import TlsConnection


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
    child: Child
    last_words_fd: int  # of a pipe that the worker may write to before it ends
    control: SessionControl
    data: DataChannel | None = None
    reader: ReaderProcess | None = None
    readers: int = 0  # that this worker has had
    ordered: bool = False  # the device server killed it
    handing_over: TlsConnection | None = None  # of a remote client, until the worker can answer

    @property
    def pidfd(self) -> int:
        return self.child.pidfd

    def kill(self) -> None:
        if not process.has_ended(self.child.pidfd):  # else it ended for a reason of its own
            self.ordered = True
        self.child.kill()

    def reap(self, forks: ForkServer) -> End:
        """Take the status of the ended process, close its descriptors, and return why it ended."""
        if self.reader is not None:
            self.reader.kill()  # the device server reaps it when it has ended
        end = self._end(os.waitstatus_to_exitcode(forks.reap(self.child)))
        os.close(self.last_words_fd)
        if self.data is not None:
            self.data.ours.close()
        if self.handing_over is not None:
            self.handing_over.socket.close()
        return end

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
        why = Why.DEVICE_FAILED if status == _core.EXIT_DEVICE_FAILED else Why.WORKER_FAILED
        return End(why, words.decode(errors="replace") or f"exit code {status}")


def start(
    forks: ForkServer,
    offer: orders.DeviceOffer,
    client: ClientConnection,
    control: SessionControl,
    authority: str | None,
    serves_data: bool,
) -> WorkerProcess:
    """Start a worker, which takes the client's connection over.

    `authority` is the pool's certificate; None: the device server does not listen.
    """
    child = forks.fork()
    data = remote = None
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    grant = control.grant
    fds = [client.connection.fileno(), write_fd]
    fds += [control.block.fd(), control.orders_fd, control.reports_fd]
    if client.is_local:
        fds.append(client.host_fd)
    if authority is not None:
        data = DataChannel.open()
        fds.append(data.theirs.fileno())
        remote = orders.RemoteAccess(
            authority, grant.client, data.data_id, data.secret, serves_data
        )
    order = orders.ServeSession(
        offer, grant.session, grant.most_bytes, client.devices, client.host_bytes,
        client.is_local, remote,
    )  # fmt: skip
    tell(child, order, fds)
    os.close(write_fd)
    if data is not None:
        data.theirs.close()
    worker = WorkerProcess(grant, child, read_fd, control, data)
    control.has_reader = lambda: worker.reader is not None
    return worker


def tell(child: Child, order: orders.Order, fds: Sequence[int]) -> None:
    """Give a child its order."""
    with suppress(OSError):  # it has ended already: its status says why
        frames.send(child.line, order, fds)
