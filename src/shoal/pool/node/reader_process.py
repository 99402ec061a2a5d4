"""The device server's side of readers: who may have one, its memory, and its process."""

from __future__ import annotations

import fcntl
import hmac
import os
import signal
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from shoal.errors import ProtocolError
from shoal.pool.base import limits, log, process
from shoal.pool.base.folders import Folders
from shoal.pool.wire import frames, messages, node_messages

if TYPE_CHECKING:
    import ssl

ANSWER_S = 5.0  # for an answer to leave
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
NO_FOLDERS = (
    "this node serves no files. Its owner can serve a folder: add --data DIR to `shoal node` or "
    "`shoal up`"
)


@dataclass
class ReaderProcess:
    """A reader beside a session's worker."""

    pid: int
    pidfd: int

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        os.close(self.pidfd)
        os.waitpid(self.pid, 0)


def check(
    attach: messages.AttachReader, client: str, grant: node_messages.Grant, secret: bytes
) -> None:
    """Whether who asks is the one that the session is for. Every wrong question has one answer."""
    same = (grant.client, grant.lease, grant.epoch) == (client, attach.lease, attach.epoch)
    if not hmac.compare_digest(attach.secret, secret) or not same:
        raise ProtocolError("the session is not known here: it ended, or is another's")


def new_memory() -> int:
    """A descriptor of memory that neither side can cut short under the other."""
    fd = os.memfd_create("shoal-reader", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, limits.READER_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def start(
    connection: ssl.SSLSocket,
    channel: socket.socket,
    number: int,
    folders: Folders,
    leave_behind: Callable[[Collection[object]], None],
) -> ReaderProcess:
    """Passes a new memory to the worker by `channel` and forks the reader, which takes the connection
    over."""
    from shoal import _core

    memory_fd = new_memory()
    try:
        socket.send_fds(channel, [_core.passed_reader_memory(number)], [memory_fd])
        pid = os.fork()
        if pid == 0:
            _become_reader(connection, memory_fd, folders, number, leave_behind)
        return ReaderProcess(pid, process.watch(pid))
    except OSError as error:
        raise ProtocolError(f"no reader can be started: {error}") from None
    finally:
        os.close(memory_fd)


def _become_reader(
    connection: ssl.SSLSocket,
    memory_fd: int,
    folders: Folders,
    number: int,
    leave_behind: Callable[[Collection[object]], None],
) -> NoReturn:
    """Runs in the forked child and never returns."""
    try:
        process.die_with_parent_thread()
        log.set_up("reader")
        leave_behind((connection,))
        connection.settimeout(ANSWER_S)
        # The device is the worker's; a reader only uses torch to hold and collate what it reads.
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        from shoal.train.data import reader  # imports torch, which the device server does without

        reader.serve(connection, memory_fd, limits.READER_BYTES, folders, number)
        os._exit(0)
    except BaseException as error:
        with suppress(OSError):
            connection.settimeout(ANSWER_S)
            frames.send(connection, messages.refusal(f"the reader did not start: {error}"))
    os._exit(1)
