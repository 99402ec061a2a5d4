"""The process that forks children: what it passes, how it ends, what it does not inherit."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from shoal.pool.base import process
from shoal.pool.node import fork_server
from shoal.pool.node.fork_server import Child, ForkServer
from tests.support.processes import alive, parent
from tests.support.waiting import wait_until


def _echo(line: socket.socket) -> None:
    """A child that answers once, and then ends as it is told: by "exit N" or by its line's end."""
    line.sendall(f"{os.getpid()} {len(os.listdir('/proc/self/fd'))}".encode())
    words = line.recv(100).split()
    os._exit(int(words[1]) if words else 77)


@pytest.fixture
def forks() -> Iterator[ForkServer]:
    """In a process of its own: a fork server ends with the thread that started it."""
    made = fork_server.start(_echo, ())
    yield made
    made._requests.close()
    with suppress(ChildProcessError):
        os.wait()


def end(forks: ForkServer, child: Child) -> int:
    process.wait_readable([child.pidfd], 20)
    return os.waitstatus_to_exitcode(forks.reap(child))


def test_a_child_is_reached_by_its_line_and_its_status_comes_back(forks: ForkServer) -> None:
    children = [forks.fork() for _ in range(3)]
    for code, child in enumerate(children):
        assert int(child.line.recv(100).split()[0]) == child.pid
        child.line.sendall(f"exit {code}".encode())
    assert [end(forks, child) for child in reversed(children)] == [2, 1, 0]


def test_children_inherit_no_descriptor_of_another(forks: ForkServer) -> None:
    first = forks.fork()
    second = forks.fork()
    assert first.line.recv(100).split()[1] == second.line.recv(100).split()[1]
    for child in (first, second):
        child.kill()
        assert end(forks, child) == -signal.SIGKILL


def test_a_child_ends_with_its_line(forks: ForkServer) -> None:
    child = forks.fork()
    child.line.recv(100)
    child.line.shutdown(socket.SHUT_RDWR)
    assert end(forks, child) == 77


def test_children_end_with_the_fork_server(forks: ForkServer) -> None:
    child = forks.fork()
    child.line.recv(100)
    os.kill(parent(child.pid), signal.SIGKILL)
    wait_until(lambda: not alive(child.pid), 20, "the child has ended")
    assert process.wait_readable([forks.fileno()], 20)  # so the device server notices
    with pytest.raises(fork_server.Lost):
        forks.fork()
    os.close(child.pidfd)
    child.line.close()
