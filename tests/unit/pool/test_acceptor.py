"""Pending connections are bounded in number, by address and in time; no loop spins."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.pool.base import process
from shoal.pool.wire.acceptor import Acceptor, PendingConnection, SelectorLoop


class Accepting:
    """An acceptor with its loop, and the connections that it took."""

    def __init__(self, listener: socket.socket, **options: Any) -> None:
        self.loop = SelectorLoop()
        self.taken: list[PendingConnection] = []
        self.late: list[PendingConnection] = []
        self.acceptor = Acceptor(
            listener, self.loop, PendingConnection, self._take, self._on_late, **options
        )
        self.loop.call_later(0, lambda: None)

    def _take(self, pending: PendingConnection) -> None:
        self.taken.append(pending)
        self.loop.add_reader(pending.socket, self.acceptor.drop, pending)

    def _on_late(self, pending: PendingConnection) -> None:
        self.late.append(pending)
        self.acceptor.drop(pending)

    def run(self, turns: int = 10) -> None:
        for _ in range(turns):
            self.loop.call_later(0.01, lambda: None)
            self.loop.run_once()


@pytest.fixture(params=["tcp", "unix"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    if request.param == "tcp":
        made = socket.create_server(("127.0.0.1", 0))
    else:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.bind("")  # any abstract name
        made.listen(64)
    with made:
        yield made


def connect(listener: socket.socket) -> socket.socket:
    made = socket.socket(listener.family, socket.SOCK_STREAM)
    made.settimeout(5)
    made.connect(listener.getsockname())
    return made


def test_no_more_than_so_many_are_pending(listener: socket.socket) -> None:
    accepting = Accepting(listener, most=3)
    clients = [connect(listener) for _ in range(5)]
    accepting.run()
    assert len(accepting.taken) == len(accepting.acceptor.pending) == 3
    assert [c.recv(1) for c in clients[3:]] == [b"", b""]  # closed without a word
    accepting.acceptor.release(accepting.taken[0])  # it has shown who it is
    clients.append(connect(listener))
    accepting.run()
    assert len(accepting.taken) == 4
    for client in clients:
        client.close()


def test_one_address_does_not_take_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = Accepting(listener, most=10, most_per_address=2)
        clients = [connect(listener) for _ in range(4)]
        accepting.run()
        assert len(accepting.acceptor.pending) == 2
        accepting.acceptor.drop(accepting.taken[0])
        clients.append(connect(listener))
        accepting.run()
        assert len(accepting.taken) == 3
        for client in clients:
            client.close()


def test_a_deadline_ends_a_silent_connection(listener: socket.socket) -> None:
    accepting = Accepting(listener, most=3, patience_s=0.05)
    with connect(listener) as silent:
        begin = time.monotonic()
        while not accepting.late and time.monotonic() < begin + 5:
            accepting.run(1)
        assert accepting.late == accepting.taken
        assert silent.recv(1) == b""
    assert not accepting.acceptor.pending


def test_a_released_connection_has_no_deadline(listener: socket.socket) -> None:
    accepting = Accepting(listener, most=3, patience_s=0.02)
    with connect(listener):
        accepting.run(1)
        accepting.acceptor.release(accepting.taken[0])
        time.sleep(0.03)
        accepting.run()
        assert not accepting.late
        assert accepting.taken[0].socket.fileno() >= 0
        accepting.taken[0].socket.close()


def test_a_loop_without_descriptors_waits(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener stays readable when accept() fails; the acceptor must not call it at once again."""
    calls = []

    def accept(_: socket.socket) -> Any:
        calls.append(time.monotonic())
        raise OSError(24, "Too many open files")

    accepting = Accepting(listener, most=3)
    with connect(listener) as client:
        monkeypatch.setattr(socket.socket, "accept", accept)
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            accepting.run(1)
        assert 2 <= len(calls) <= 6
        monkeypatch.undo()
        accepting.run(20)
        assert len(accepting.taken) == 1
        client.close()


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12))
def test_timers_run_in_order_and_cancelled_ones_do_not(timers: list[tuple[int, bool]]) -> None:
    loop = SelectorLoop()
    ran: list[int] = []
    with mock.patch.object(time, "monotonic", return_value=time.monotonic()):  # all at one moment
        made = [loop.call_later(delay / 1000, ran.append, i) for i, (delay, _) in enumerate(timers)]
        loop.call_later(0.004, ran.append, -1)
    for timer, (_, cancelled) in zip(made, timers, strict=True):
        if cancelled:
            timer.cancel()
    while -1 not in ran:
        loop.run_once()
    wanted = [i for i, (_, cancelled) in enumerate(timers) if not cancelled]
    assert sorted(ran[:-1]) == wanted
    assert [timers[i][0] for i in ran[:-1]] == sorted(timers[i][0] for i in wanted)
    loop.close()


def test_a_callback_may_remove_another_that_is_ready() -> None:
    loop = SelectorLoop()
    pairs = [socket.socketpair() for _ in range(2)]
    ran = []

    def hear(own: int) -> None:
        ran.append(own)
        for reader, _ in pairs:
            loop.remove_reader(reader)

    for number, (reader, writer) in enumerate(pairs):
        loop.add_reader(reader, hear, number)
        writer.send(b"x")
    loop.run_once()
    assert len(ran) == 1
    for pair in pairs:
        for end in pair:
            end.close()
    loop.close()


@given(st.lists(st.booleans(), max_size=30))
def test_back_off_grows_only_with_failures_in_a_row(worked: list[bool]) -> None:
    backoff = process.Backoff()
    before = 0.0
    for number, one in enumerate(worked):
        delay_s = backoff.ended(one)
        in_a_row = next((i for i, w in enumerate(reversed(worked[: number + 1])) if w), number + 1)
        assert backoff.failures == in_a_row
        assert (delay_s == 0) == (in_a_row < 2)
        assert delay_s <= 5.0
        assert one or delay_s >= before
        before = delay_s


def test_a_lower_limit_lets_those_that_are_there_stay(listener: socket.socket) -> None:
    """A head takes more at its start, when the clients of an earlier one come back at once."""
    accepting = Accepting(listener, most=5, most_per_address=5)
    clients = [connect(listener) for _ in range(4)]
    accepting.run()
    assert len(accepting.acceptor.pending) == 4
    accepting.acceptor.limit(3, 2)
    clients.append(connect(listener))
    accepting.run()
    assert len(accepting.acceptor.pending) == 4
    assert clients[-1].recv(1) == b""
    for pending in accepting.taken[:3]:
        accepting.acceptor.release(pending)
    clients.append(connect(listener))
    accepting.run()
    assert len(accepting.acceptor.pending) == 2
    for client in clients:
        client.close()
