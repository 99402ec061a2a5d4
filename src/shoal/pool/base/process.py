"""Processes of a pool: they end when those they belong to end, however that happens."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import struct

from shoal.errors import ProtocolError

_PR_SET_PDEATHSIG = 1


def die_with_parent_thread() -> None:
    """The kernel kills this process when the thread that started it ends.

    Only right where that thread is its process's main one.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def watch(pid: int) -> int:
    """A descriptor that becomes readable when the process has ended.

    A pipe would not do: children that the process forks inherit its ends and keep them open.
    """
    return os.pidfd_open(pid)


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def exit_reason(status: int) -> str:
    """What `status` of a child says, in words."""
    if status < 0:
        return f"it was killed by {signal.Signals(-status).name}"
    return f"it ended with exit code {status}"


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
