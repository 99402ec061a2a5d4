"""Processes of a pool: they end when those they belong to end, however that happens."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from shoal.errors import ProtocolError, describe
from shoal.pool.base import limits

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
READY = b"ready\n"
FAILED = b"failed "


def program_name() -> str:
    """Return the name of this program in the pool's status: of a task, with the task's id."""
    task, name = os.environ.get("SHOAL_TASK", ""), os.path.basename(sys.argv[0] or "python")
    return f"{task}: {name} (pid {os.getpid()})".removeprefix(": ")[:200]


def die_with_parent_thread() -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Only right where that thread is its process's main one.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def gain_no_privileges() -> None:
    """Have the kernel ignore set-user-id programs and file capabilities, here and in all children."""
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def hide_memory() -> None:
    """Forbid other processes of this user, other sessions' workers among them, to read our memory."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def report_ready(fd: int = 1) -> None:
    """Tell the process that started this one, by our stdout, that it is ready."""
    with suppress(OSError):  # it has ended: so will this process
        os.write(fd, READY)


def report_failure(reason: str) -> None:
    """Tell the process that started this one why it cannot start."""
    line = " ".join(reason.split()).encode()[: limits.REPORT_BYTES_MAX - len(FAILED) - 1]
    with suppress(OSError):
        os.write(1, FAILED + line + b"\n")


def start_problem(error: BaseException) -> str:
    """Return why a process of a pool cannot start, for `report_failure`."""
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return (
            "another pool or node of this user has the same name on this machine, with its state in "
            "another directory. End it with `shoal down`, or choose another name with --name"
        )
    return describe(error)


def failure_in(report: bytes) -> str | None:
    """Return the reason in a report of `report_failure`, or None for another report."""
    if not report.startswith(FAILED):
        return None
    return report.removeprefix(FAILED).decode(errors="replace").strip()


@dataclass
class Backoff:
    """When to start a process again: at once if it worked, ever later if it fails to start."""

    failures: int = 0  # in a row

    def ended(self, worked: bool) -> float:
        """Note that the process ended. Return the seconds to wait before the next start."""
        self.failures = 0 if worked else self.failures + 1
        if self.failures < 2:
            return 0.0
        return min(limits.RESTART_BACKOFF_MAX_S, limits.RESTART_BACKOFF_S * float(2**self.failures))


def watch(pid: int) -> int:
    """Return a descriptor that becomes readable when the process has ended.

    A pipe would not do: children that the process forks inherit its ends and keep them open.
    """
    return os.pidfd_open(pid)


def wait_readable(fds: Iterable[int], timeout_s: float | None = None) -> set[int]:
    """Wait until one of `fds` is readable or closed, and return those that are.

    By poll(): select() fails in a program with more than 1024 descriptors.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)}


def children(pid: int) -> list[int]:
    """Return the children of a process that has one thread."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def has_ended(pidfd: int) -> bool:
    return bool(wait_readable([pidfd], 0))


def exit_reason(status: int) -> str:
    """Describe a child's exit status in words."""
    if status < 0:
        return f"it was killed by {signal.Signals(-status).name}"
    return f"it ended with exit code {status}"


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket, as the kernel knows them."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", data)
    return pid, uid


def check_same_user(connection: socket.socket) -> None:
    """Raise ProtocolError unless the peer is of the pool's own user, or root."""
    _, uid = peer_credentials(connection)
    if uid not in (os.getuid(), 0):
        raise ProtocolError("this pool belongs to another user of the machine")
