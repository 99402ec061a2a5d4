"""A data reader's process: who may have one, its memory, and how it starts.

What a reader does is not the pool's business: the owner of the pool names the module whose `serve`
reads the node's files (`shoal up` names shoal.train.data.reader).
"""

from __future__ import annotations

import fcntl
import hmac
import importlib
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import msgspec

from shoal.errors import ProtocolError
from shoal.pool.base import limits, log, sealed_memory
from shoal.pool.base.folders import Folders
from shoal.pool.node import orders
from shoal.pool.node.fork_server import Child, ForkServer
from shoal.pool.wire import frames, messages, node_messages, session_messages

if TYPE_CHECKING:
    from shoal.pool.node.tls_acceptor import TlsConnection

NO_SESSION = "the session is not known here: it ended, or is another's"
NO_FOLDERS = (
    "this node serves no files. Its owner can serve a folder: add --data DIR to `shoal node` or "
    "`shoal up`"
)


class ServedData(msgspec.Struct, frozen=True):
    """The training data that a node serves to sessions on its devices."""

    folders: tuple[str, ...] = ()
    reader: str = ""  # module whose `serve` reads them, in a process of its own


@dataclass
class ReaderProcess:
    """A data reader beside a session's worker."""

    child: Child
    handing_over: TlsConnection | None = None  # until the reader can answer

    def kill(self) -> None:
        self.child.kill()

    def reap(self, forks: ForkServer) -> None:
        forks.reap(self.child)
        if self.handing_over is not None:
            self.handing_over.socket.close()


def check(
    attach: session_messages.AttachReader, client: str, grant: node_messages.Grant, secret: bytes
) -> None:
    """Raise ProtocolError unless the caller owns the session; always with the same text."""
    same = (grant.client, grant.lease, grant.epoch) == (client, attach.lease, attach.epoch)
    if not hmac.compare_digest(attach.secret, secret) or not same:
        raise ProtocolError(NO_SESSION)


def start(
    forks: ForkServer,
    connection: TlsConnection,
    channel: socket.socket,
    number: int,
    data: ServedData,
    authority: str,
) -> ReaderProcess:
    """Pass new memory to the worker by `channel`, and start a reader, which takes the connection
    over."""
    from shoal import _core

    seals = sealed_memory.FIXED_SIZE | fcntl.F_SEAL_SEAL
    memory_fd = sealed_memory.create("shoal-reader", limits.READER_BYTES, seals)
    try:
        socket.send_fds(channel, [_core.passed_reader_memory(number)], [memory_fd])
        child = forks.fork()
        remote = orders.RemoteAccess(authority, connection.peer.name)
        order = orders.ServeReader(data.reader, list(data.folders), number, remote)
        frames.send(child.line, order, [connection.socket.fileno(), memory_fd])
        return ReaderProcess(child, connection)
    except OSError as error:
        raise ProtocolError(f"no reader can be started: {error}") from None
    finally:
        os.close(memory_fd)


def serve(order: orders.ServeReader, fds: list[int], line: socket.socket) -> NoReturn:
    """In the child: serve the client, then exit. `fds` are those of `orders.ServeReader`."""
    from shoal import _core
    from shoal.pool.node.worker_main import check_owner, take_over

    connection = socket.socket(fileno=fds[0])
    try:
        log.set_up("reader")
        # The device is the worker's; a reader only uses torch to hold and collate what it reads.
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        key, certificate = _core.make_session_identity()
        connection = taken = take_over(connection, line, order.remote, key, certificate)
        check_owner(taken, order.remote)
        line.close()
        reader = importlib.import_module(order.module)  # imports torch
        folders = Folders(tuple(order.folders))
        reader.serve(taken, fds[1], limits.READER_BYTES, folders, order.number)
        os._exit(0)
    except BaseException as error:
        with suppress(OSError):
            connection.settimeout(limits.SERVER_SEND_S)
            frames.send(connection, messages.refusal(f"the reader did not start: {error}"))
    os._exit(1)
