"""The process that forks a device's workers, data readers and probes. It holds no secret.

The device server forks it after loading torch's libraries and before it has read a key or a grant.
A request says nothing but "fork": what the child needs comes to the child alone, over its **line**.
So no child inherits anything of another session, and the accelerator's runtime starts in children
only.

Requests and replies are packets: a fork or a reaped status at a time, in order.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

from shoal.errors import ProtocolError
from shoal.pool.base import limits, process

_FORK = b"fork"
_NUMBER = struct.Struct("<q")  # a process id, a wait status, or minus an errno


class Lost(Exception):
    """The fork server has ended or does not answer. The device server ends then, too."""


@dataclass
class Child:
    """A process that the fork server forked for the device server."""

    pid: int
    pidfd: int
    line: socket.socket  # to the child; it ends with either side

    def kill(self) -> None:
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)  # a zombie takes it, too


class ForkServer:
    """The device server's end."""

    def __init__(self, requests: socket.socket) -> None:
        requests.settimeout(limits.FORK_S)
        self._requests = requests

    def fileno(self) -> int:
        """Of a descriptor that becomes readable when the fork server has ended."""
        return self._requests.fileno()

    def fork(self) -> Child:
        """Fork a child, which waits for its order on the line."""
        ours, theirs = socket.socketpair()
        try:
            number, fds = self._ask(_FORK, (theirs.fileno(),))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        if number < 0 or len(fds) != 1:
            ours.close()
            raise ProtocolError(f"no process can be started: {os.strerror(-number)}")
        return Child(number, fds[0], ours)

    def reap(self, child: Child) -> int:
        """Return the wait status of a child that has ended, and close what leads to it."""
        status, _ = self._ask(_NUMBER.pack(child.pid))
        os.close(child.pidfd)
        child.line.close()
        return status

    def _ask(self, request: bytes, fds: Iterable[int] = ()) -> tuple[int, list[int]]:
        try:
            socket.send_fds(self._requests, [request], list(fds))
            reply, passed, _, _ = socket.recv_fds(
                self._requests, _NUMBER.size, 1, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise Lost(f"the fork server does not answer: {error}") from None
        if len(reply) != _NUMBER.size:
            raise Lost("the fork server has ended")
        return _NUMBER.unpack(reply)[0], passed


def start(run_child: Callable[[socket.socket], None], close: Iterable[socket.socket]) -> ForkServer:
    """Fork the fork server. It closes the sockets of `close`, which are the device server's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        for each in close:
            each.close()
        _serve(theirs, run_child)
    theirs.close()
    return ForkServer(ours)


def _serve(requests: socket.socket, run_child: Callable[[socket.socket], None]) -> NoReturn:
    """Answer the device server until it is gone."""
    try:
        process.die_with_parent_thread()
        process.gain_no_privileges()
        while True:
            request, fds, _, _ = socket.recv_fds(requests, 16, 1, socket.MSG_CMSG_CLOEXEC)
            if not request:
                break
            if request == _FORK:
                _fork(requests, socket.socket(fileno=fds[0]), run_child)
            else:
                _, status = os.waitpid(_NUMBER.unpack(request)[0], 0)
                requests.send(_NUMBER.pack(status))
    finally:
        os._exit(0)  # its children end with it


def _fork(
    requests: socket.socket, line: socket.socket, run_child: Callable[[socket.socket], None]
) -> None:
    try:
        pid = os.fork()
    except OSError as error:
        requests.send(_NUMBER.pack(-(error.errno or 1)))
        line.close()
        return
    if pid == 0:
        try:
            requests.close()
            process.die_with_parent_thread()
            run_child(line)
        finally:
            os._exit(1)
    line.close()
    pidfd = process.watch(pid)
    socket.send_fds(requests, [_NUMBER.pack(pid)], [pidfd])
    os.close(pidfd)
