"""The processes of an attempt: found whatever they do, and ended.

The process that starts a program is a *subreaper*: the kernel gives it every orphan below it, so also
a program that forks twice or begins a session of its own stays its descendant.
"""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this kernel has no PR_SET_CHILD_SUBREAPER")


def descendants(pid: int) -> list[int]:
    """Return the processes below `pid`, those nearest first."""
    below: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            above = _parent(int(entry))
            if above is not None:
                below.setdefault(above, []).append(int(entry))
    found, at = list(below.get(pid, ())), 0
    while at < len(found):
        found += below.get(found[at], ())
        at += 1
    return found


def children(pid: int) -> list[int]:
    """Return the children of this process, those included that have ended and wait to be reaped."""
    return [
        int(entry)
        for entry in os.listdir("/proc")
        if entry.isdecimal() and _parent(int(entry)) == pid
    ]


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[1])


def _is_below(pid: int, top: int) -> bool:
    for _ in range(1000):  # deeper than any tree of processes that works
        above = _parent(pid)
        if above is None or above <= 1:
            return False
        if above == top:
            return True
        pid = above
    return False


def send_signal(top: int, number: int, but: frozenset[int] = frozenset(), alone: int = 0) -> int:
    """Send a signal to everything below `top`, except below the processes in `but`, and to `alone`.

    A descriptor of the process keeps its number from meaning another process meanwhile.
    """
    spared = {p for one in but for p in (one, *descendants(one))} | {alone}
    count = 0
    for pid in descendants(top):
        if pid in spared:
            continue
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if _is_below(pid, top):
                with suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(pidfd, number)
                    count += 1
        finally:
            os.close(pidfd)
    return count


def exit_code(status: int) -> int:
    """Return a shell's exit code: 128 + n for signal n."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
