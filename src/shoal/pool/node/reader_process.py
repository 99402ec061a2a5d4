"""A data reader's process: who may have one, its memory, and how the device server forks it.

What a reader does is not the pool's business: the owner of the pool names the module whose `serve`
reads the node's files (`shoal up` names shoal.train.data.reader).
"""

from __future__ import annotations

import fcntl
import hmac
import importlib
import os
import signal
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import msgspec

from shoal.errors import ProtocolError
from shoal.pool.base import limits, log, process, sealed_memory
from shoal.pool.base.folders import Folders
from shoal.pool.wire import frames, messages, node_messages, session_messages

if TYPE_CHECKING:
    import ssl

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

    pid: int
    pidfd: int

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        os.close(self.pidfd)
        os.waitpid(self.pid, 0)


def check(
    attach: session_messages.AttachReader, client: str, grant: node_messages.Grant, secret: bytes
) -> None:
    """Raise ProtocolError unless the caller owns the session; always with the same text."""
    same = (grant.client, grant.lease, grant.epoch) == (client, attach.lease, attach.epoch)
    if not hmac.compare_digest(attach.secret, secret) or not same:
        raise ProtocolError(NO_SESSION)


def start(
    connection: ssl.SSLSocket,
    channel: socket.socket,
    number: int,
    data: ServedData,
    leave_behind: Callable[[Collection[object]], None],
) -> ReaderProcess:
    """Pass new memory to the worker by `channel`, and fork the reader, which takes the connection
    over."""
    from shoal import _core

    seals = sealed_memory.FIXED_SIZE | fcntl.F_SEAL_SEAL
    memory_fd = sealed_memory.create("shoal-reader", limits.READER_BYTES, seals)
    try:
        socket.send_fds(channel, [_core.passed_reader_memory(number)], [memory_fd])
        pid = os.fork()
        if pid == 0:
            _become_reader(connection, memory_fd, data, number, leave_behind)
        return ReaderProcess(pid, process.watch(pid))
    except OSError as error:
        raise ProtocolError(f"no reader can be started: {error}") from None
    finally:
        os.close(memory_fd)


def _become_reader(
    connection: ssl.SSLSocket,
    memory_fd: int,
    data: ServedData,
    number: int,
    leave_behind: Callable[[Collection[object]], None],
) -> NoReturn:
    """Serve the client in the forked child, then exit."""
    try:
        process.die_with_parent_thread()
        log.set_up("reader")
        leave_behind((connection,))
        connection.settimeout(limits.SERVER_SEND_S)
        # The device is the worker's; a reader only uses torch to hold and collate what it reads.
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        reader = importlib.import_module(data.reader)  # imports torch
        folders = Folders(data.folders)
        reader.serve(connection, memory_fd, limits.READER_BYTES, folders, number)
        os._exit(0)
    except BaseException as error:
        with suppress(OSError):
            connection.settimeout(limits.SERVER_SEND_S)
            frames.send(connection, messages.refusal(f"the reader did not start: {error}"))
    os._exit(1)
