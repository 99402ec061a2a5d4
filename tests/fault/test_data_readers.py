"""Hostile words to a reader, about its memory, and at the door that it is behind: a named refusal, and
nobody else notices.
"""

from __future__ import annotations

import secrets
import socket
import ssl
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.pool.base import limits
from shoal.pool.client import head_connection
from shoal.pool.wire import data_messages, frames, messages, session_messages, tls
from tests.support import processes, wire
from tests.support.data_client import DataClient, message, until_end
from tests.support.raw_client import Kind
from tests.support.standing import StandingPool
from tests.support.waiting import wait_until

ALLOCATE, READ, SYNC, LOAD = Kind.ALLOCATE, Kind.READ, Kind.SYNC, Kind.LOAD
MASK = 2**64 - 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served")
    np.save(made / "x.npy", np.arange(600, dtype=np.int64).reshape(100, 6))
    return made


@pytest.fixture(scope="module")
def pool(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    options = ("--data", str(folder))
    with StandingPool(
        tmp_path_factory.mktemp("pool"), "cpu,memory=256MiB,threads=1", listen=True, options=options
    ) as made:
        yield made


def attach(raw: DataClient, identity: tls.Identity | None = None, **changes: Any) -> Any:
    """What the door answers to one who wants a reader, and the connection."""
    at = raw.attached
    connection = head_connection.open_tls(
        at.host, at.port, identity or raw.identity, at.server_name, 10
    )
    connection.settimeout(30)
    request = session_messages.AttachReader(
        session_messages.our_versions(), raw.lease.lease, raw.lease.epoch, at.welcome.data_id,
        at.welcome.secret,
    )  # fmt: skip
    frames.send(connection, msgspec.structs.replace(request, **changes))
    answer = frames.receive(connection, wire.ANY)[0]
    if isinstance(answer, session_messages.Handover):
        name = shoal._core.SESSION_SERVER_NAME
        connection = tls.connect_again(
            connection, identity or raw.identity, answer.certificate, name
        )
        answer = frames.receive(connection, wire.ANY)[0]
    return answer, connection


def start(raw: DataClient) -> tuple[session_messages.ReaderReady, ssl.SSLSocket]:
    ready, connection = attach(raw)
    assert isinstance(ready, session_messages.ReaderReady), ready
    return ready, connection


def ask(connection: ssl.SSLSocket, request: msgspec.Struct) -> msgspec.Struct:
    frames.send(connection, request)
    return frames.receive(connection, wire.ANY)[0]


def open_x(connection: ssl.SSLSocket, folder: Path) -> data_messages.DataOpened:
    opened = ask(
        connection,
        data_messages.OpenData(1, 0, [data_messages.DataPath(str(folder / "x.npy"))]),
    )
    assert isinstance(opened, data_messages.DataOpened), opened
    return opened


def numbers(*which: int) -> bytes:
    return struct.pack(f"<{len(which)}q", *which)


# --- the door ---


def test_only_the_sessions_own_client_gets_a_reader(raw: DataClient, pool: StandingPool) -> None:
    other = pool.join(f"other-{secrets.token_hex(3)}")
    for identity, changes in (
        (other, {}),  # all of the session's secrets, but another's certificate
        (None, {"secret": secrets.token_bytes(32)}),
        (None, {"secret": b""}),
        (None, {"data_id": secrets.token_bytes(16)}),
        (None, {"data_id": b""}),
        (None, {"lease": raw.lease.lease + 1}),
        (None, {"epoch": raw.lease.epoch + 1}),  # a late holder
    ):
        refused, _ = attach(raw, identity, **changes)
        assert isinstance(refused, messages.Refusal), changes
        assert "the session is not known here" in refused.reason
    versions = msgspec.structs.replace(session_messages.our_versions(), protocol=1)
    refused, _ = attach(raw, versions=versions)
    assert isinstance(refused, messages.Refusal)
    assert "versions differ" in refused.reason
    assert processes.alive(raw.worker_pid)


def test_a_session_has_one_reader_at_a_time(raw: DataClient) -> None:
    ready, connection = start(raw)
    refused, _ = attach(raw)
    assert isinstance(refused, messages.Refusal)
    assert "has a reader" in refused.reason
    connection.close()

    def again() -> bool:
        answer, _ = attach(raw)
        return (
            isinstance(answer, session_messages.ReaderReady) and answer.number == ready.number + 1
        )

    wait_until(again, 30, "the next reader has the next number")


def received(down: ssl.SSLSocket) -> bytes:
    found = down.recv(65536)
    assert found, "the worker has ended the session"
    return found


def test_what_a_reader_that_died_has_read_can_still_be_loaded(
    raw: DataClient, folder: Path
) -> None:
    """Messages that name it may be behind a long call when the next reader comes."""
    ready, connection = start(raw)
    read = data_messages.ReadSamples(1, open_x(connection, folder).source, numbers(2), 64, 4096)
    assert isinstance(ask(connection, read), data_messages.SamplesRead)
    connection.close()
    wait_until(
        lambda: isinstance(attach(raw)[0], session_messages.ReaderReady), 30, "there is another"
    )
    address = raw.session << 52 | 7 << 30
    up, down = raw.both()
    down.settimeout(20)
    up.sendall(message(ALLOCATE, address, 4096) + message(LOAD, address, 48, ready.number, 64))
    up.sendall(message(READ, address, 48))
    heard = b""
    while struct.pack("<6q", *range(12, 18)) not in heard:
        heard += received(down)
    # Once the next one was named, the one before is gone.
    up.sendall(message(LOAD, address, 48, ready.number + 1, 0))
    up.sendall(message(LOAD, address, 48, ready.number, 64) + message(SYNC))
    while b"has no reader 1" not in heard:
        heard += received(down)


# --- its requests ---


def test_what_a_reader_refuses(raw: DataClient, folder: Path, tmp_path: Path) -> None:
    ready, connection = start(raw)
    opened = open_x(connection, folder)
    assert (opened.samples, opened.sample_bytes) == (100, 48)

    def failed(request: msgspec.Struct) -> str:
        answer = ask(connection, request)
        assert isinstance(answer, data_messages.DataFailed), answer
        assert answer.request == request.request  # type: ignore[union-attr]
        return answer.reason

    read = data_messages.ReadSamples(7, opened.source, numbers(0, 99), 0, 4096)
    change = msgspec.structs.replace
    assert isinstance(ask(connection, read), data_messages.SamplesRead)
    for bad in (numbers(100), numbers(-1), numbers(0, 2**63 - 1), b"", b"\0" * 7):
        assert failed(change(read, numbers=bad))
    for slot in (
        {"offset": ready.memory_bytes},
        {"offset": 64, "capacity_bytes": ready.memory_bytes},
        {"offset": 2**63 - 64},
        {"offset": 3},
        {"capacity_bytes": 2**63 - 1},
    ):
        assert "outside" in failed(change(read, **slot))
    small = ask(connection, change(read, capacity_bytes=16))
    assert isinstance(small, data_messages.SamplesTooLarge)
    assert small.needed_bytes >= 96
    many = change(read, numbers=numbers(*[0] * 2**14), capacity_bytes=0)
    assert isinstance(ask(connection, many), data_messages.SamplesTooLarge)
    assert failed(change(read, source=99))
    (tmp_path / "x.npy").write_bytes((folder / "x.npy").read_bytes())
    for path in (tmp_path / "x.npy", "/etc/passwd", "/proc/self/mem", "x.npy", "/nothing"):
        asked = data_messages.OpenData(9, 0, [data_messages.DataPath(str(path))])
        assert "not below" in failed(asked) or path == "x.npy"
    (folder / "broken.npy").write_bytes(b"\x93NUMPY\x01\x00\xff\xff")
    (folder / "broken.parquet").write_bytes(b"PAR1 nothing")
    for name in ("broken.npy", "broken.parquet"):
        asked = data_messages.OpenData(9, 0, [data_messages.DataPath(str(folder / name))])
        assert failed(asked)
    wrong = data_messages.OpenData(9, 3, [data_messages.DataPath(str(folder / "x.npy"))])
    assert "names leaf 3" in failed(wrong)
    assert "sources at most" in _fill(connection, folder)
    frames.send(connection, data_messages.CloseData(opened.source))
    assert open_x(connection, folder).samples == 100


def _fill(connection: ssl.SSLSocket, folder: Path) -> str:
    for _ in range(limits.DATA_SOURCES_MAX + 1):
        path = data_messages.DataPath(str(folder / "x.npy"))
        answer = ask(connection, data_messages.OpenData(1, 0, [path]))
        if isinstance(answer, data_messages.DataFailed):
            return answer.reason
    return ""


@pytest.mark.parametrize(
    "words",
    [
        b"\xff" * 64,
        struct.pack("<I", 2**31) + b"x",
        frames.encode(messages.Beat()),
        frames.encode(messages.Refusal("no")),
        struct.pack("<I", 5) + b"hello",
    ],
)
def test_what_is_no_request_ends_the_reader_and_not_the_session(
    raw: DataClient, folder: Path, words: bytes
) -> None:
    _, connection = start(raw)
    connection.sendall(words)
    until_end(connection)
    wait_until(
        lambda: isinstance(attach(raw)[0], session_messages.ReaderReady), 30, "there is another"
    )
    assert processes.alive(raw.worker_pid)


def test_too_many_requests_end_the_reader(raw: DataClient, folder: Path) -> None:
    _, connection = start(raw)
    opened = open_x(connection, folder)
    read = frames.encode(data_messages.ReadSamples(1, opened.source, numbers(0), 0, 4096))
    connection.settimeout(20)
    try:
        for _ in range(50):
            connection.sendall(read * limits.READS_MAX)
    except (OSError, ssl.SSLError):
        pass
    until_end(connection)
    assert processes.alive(raw.worker_pid)


def test_a_message_that_drips_is_not_waited_for(raw: DataClient, folder: Path) -> None:
    """Five seconds for a whole message; a reader that nobody asks anything waits for its session."""
    _, connection = start(raw)
    connection.sendall(b"\x10\x00")
    connection.settimeout(20)
    assert connection.recv(1) == b""


# --- its memory, in the op stream ---


def outcomes(raw: DataClient, *words: bytes) -> bytes:
    """Everything that the worker says until it has answered a sync behind these."""
    up, down = raw.both()
    for one in words:
        up.sendall(one + message(SYNC))
    heard = b""
    wanted = len(words)
    down.settimeout(20)
    while _replies(heard) < wanted:
        heard += down.recv(65536)
    return heard


def _replies(heard: bytes) -> int:
    """Replies to syncs in what came, whatever else is between them."""
    count, at = 0, 0
    while at + 8 <= len(heard):
        header = struct.unpack_from("<Q", heard, at)[0]
        size, kind = header & 0xFFFFFFFF, header >> 32 & 0xFFFF
        if at + size > len(heard):
            break
        count += kind == SYNC
        at += size
    return count


def test_ranges_outside_of_the_readers_memory_are_refused(raw: DataClient, folder: Path) -> None:
    ready, connection = start(raw)
    opened = open_x(connection, folder)
    read = data_messages.ReadSamples(1, opened.source, numbers(2), 64, 4096)
    assert isinstance(ask(connection, read), data_messages.SamplesRead)
    address = raw.session << 52 | 7 << 30
    size, number = ready.memory_bytes, ready.number
    up, down = raw.both()
    down.settimeout(20)
    other = address + (1 << 30)
    up.sendall(message(ALLOCATE, address, 4096) + message(ALLOCATE, other, 4096))
    good = message(LOAD, other, 48, number, 64)
    hostile = [
        (message(LOAD, address, 48, number, size), b"outside of the reader's memory"),
        (message(LOAD, address, 48, number, size - 47), b"outside of the reader's memory"),
        (message(LOAD, address, 48, number, MASK), b"outside of the reader's memory"),
        (message(LOAD, address, 48, number, MASK - 47), b"outside of the reader's memory"),
        (message(LOAD, address, size + 1, number, 0), b"outside of the reader's memory"),
        (message(LOAD, address, MASK, number, 64), b"outside of the reader's memory"),
        (message(LOAD, other, 4097, number, 0), b"segment"),
        (message(LOAD, other + 4096, 8, number, 0), b"segment"),
        (message(LOAD, address, 48, 0, 0), b"has no reader 0"),
        (message(LOAD, address, 48, number + 1, 0), b"has no reader"),
        (message(LOAD, address, 48, MASK, 0), b"has no reader"),
        (message(LOAD, address + (1 << 52), 48, number, 0), b""),
        (message(LOAD, address, 48), b""),
        (message(LOAD), b""),
    ]
    for words, reason in hostile:
        up.sendall(words + message(SYNC))
        heard = b""
        while _replies(heard) < 1:
            heard += down.recv(65536)
        assert reason in heard, (words, heard)
    up.sendall(good + message(READ, other, 48))
    wanted = struct.pack("<6q", *range(12, 18))
    heard = b""
    while wanted not in heard:
        heard += down.recv(65536)
    assert processes.alive(raw.worker_pid)


def test_without_a_reader_there_is_nothing_to_load(raw: DataClient) -> None:
    address = raw.session << 52 | 7 << 30
    heard = outcomes(raw, message(ALLOCATE, address, 4096), message(LOAD, address, 48, 1, 0))
    assert b"has no reader 1" in heard


# --- anything ---


def test_random_requests(
    pool: StandingPool, mallory: tls.Identity, raw: DataClient, folder: Path
) -> None:
    """Whatever comes: the reader answers or ends, and the device server starts another."""

    @settings(max_examples=15, deadline=None)
    @given(
        st.lists(
            st.builds(
                data_messages.ReadSamples, st.integers(0, 9), st.integers(0, 3),
                st.binary(max_size=64), st.integers(0, 2**63 - 1) | st.just(0),
                st.integers(0, 2**63 - 1) | st.just(4096),
            )
            | st.builds(
                data_messages.OpenData, st.integers(0, 9), st.integers(0, 3),
                st.lists(
                    st.builds(data_messages.DataPath, st.text(max_size=20) | st.just(str(folder))),
                    max_size=3,
                ),
            )
            | st.builds(data_messages.WarmData, st.integers(0, 3), st.binary(max_size=32)),
            max_size=12,
        )
    )  # fmt: skip
    def check(requests: list[msgspec.Struct]) -> None:
        for request in requests:
            frames.send(connection, request)
        assert open_last(connection)

    def open_last(connection: ssl.SSLSocket) -> bool:
        path = data_messages.DataPath(str(folder / "x.npy"))
        frames.send(connection, data_messages.OpenData(77, 0, [path]))
        inbox = frames.Inbox()
        while True:
            while (answer := inbox.next(wire.ANY)) is not None:
                if getattr(answer, "request", None) == 77:
                    frames.send(connection, data_messages.CloseData(getattr(answer, "source", 0)))
                    return isinstance(answer, data_messages.DataOpened)
            assert inbox.read(connection)

    _, connection = start(raw)
    check()
    assert processes.alive(raw.worker_pid)
    with shoal.connect(pool.network_url, memory=2**20, transport="network"):
        assert torch.ones(3, device="shoal").sum().item() == 3


def test_silent_strangers_at_the_door(raw: DataClient) -> None:
    """A connection that never says what it wants is dropped, also while readers come and go."""
    silent = socket.create_connection((raw.attached.host, raw.attached.port), 10)
    _, connection = start(raw)
    assert until_end(silent) == b""
    connection.close()
