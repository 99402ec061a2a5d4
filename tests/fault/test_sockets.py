"""Malformed, oversized, slow and silent bytes on the sockets of head and device server."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Iterator

import msgspec
import pytest
import torch

import shoal
from shoal.pool.base.addresses import LOCAL_PREFIX
from shoal.pool.base.paths import socket_name
from shoal.pool.client import head_connection
from shoal.pool.wire import frames, messages, node_messages, session_messages
from tests.support import processes, wire
from tests.support.raw_client import RawClient
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def pool() -> Iterator[shoal.Pool]:
    with shoal.up(["cpu,memory=512MiB,threads=1"]) as made:
        assert made.devices  # the device server is ready: its socket is answered
        yield made


@pytest.fixture(autouse=True)
def _nobody_notices(pool: shoal.Pool) -> Iterator[None]:
    """Afterwards the same processes are there, and a new lease works at once."""
    before = processes.pool_pids(pool.url)[:2]
    yield
    with shoal.connect(pool.url, memory="64MiB"):
        assert torch.ones(3, device="shoal").sum().item() == 3
    assert processes.pool_pids(pool.url)[:2] == before


def connect(pool: shoal.Pool, part: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(20)
    connection.connect(socket_name(pool.url.removeprefix(LOCAL_PREFIX), part))
    return connection


def answer(connection: socket.socket) -> msgspec.Struct | None:
    """What comes back before the other side closes."""
    try:
        reply, _ = frames.receive(connection, wire.ANY)
    except shoal.ShoalError:
        return None
    return reply


MALFORMED = {
    "too long": struct.pack("<I", 2**32 - 1) + b"x" * 100,
    "just too long": struct.pack("<I", frames.FRAME_BYTES_MAX + 1),
    "empty": struct.pack("<I", 0),
    "not msgpack": struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
    "not utf-8": struct.pack("<I", 10) + b"\x81\xa4type\xa3\xff\xfe\xfd",
    "deep": struct.pack("<I", 60_000) + b"\x91" * 60_000,
    "wrong kind": frames.encode(node_messages.Ready(2**40, 9)),
    "wrong way": frames.encode(node_messages.Grant("token", 1, 2**40)),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("part", ["head", "device-0"])
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_frames_are_refused(pool: shoal.Pool, part: str, name: str) -> None:
    with connect(pool, part) as connection:
        connection.sendall(MALFORMED[name])
        reply = answer(connection)
        assert reply is None or isinstance(reply, messages.Refusal)


@pytest.mark.parametrize("part", ["head", "device-0"])
def test_random_bytes(pool: shoal.Pool, part: str) -> None:
    dice = random.Random(1)
    for _ in range(100):
        with connect(pool, part) as connection:
            body = dice.randbytes(dice.randrange(60))
            connection.sendall(struct.pack("<I", len(body)) + body)
            if dice.random() < 0.5:
                connection.shutdown(socket.SHUT_WR)
                answer(connection)


@pytest.mark.parametrize("part", ["head", "device-0"])
def test_silent_and_slow_clients_delay_nobody(pool: shoal.Pool, part: str) -> None:
    silent = [connect(pool, part) for _ in range(20)]
    slow = connect(pool, part)
    try:
        slow.sendall(b"\x10")
        for _ in range(3):
            slow.sendall(b"\x00")
            with shoal.connect(pool.url, memory="32MiB"):
                assert torch.ones(2, device="shoal").sum().item() == 2
    finally:
        for connection in (*silent, slow):
            connection.close()


def test_the_device_server_drops_who_does_not_greet(pool: shoal.Pool) -> None:
    with connect(pool, "device-0") as connection:
        reply = answer(connection)  # nothing was sent
        assert isinstance(reply, messages.Refusal)
        assert "Hello" in reply.reason


def test_a_client_that_does_not_read_is_not_waited_for(pool: shoal.Pool) -> None:
    with connect(pool, "head") as connection:
        connection.setblocking(False)
        frame = frames.encode(messages.Describe()) * 1000
        for _ in range(200):  # until the head has had enough, or nothing more fits
            try:
                connection.send(frame)
            except (BlockingIOError, BrokenPipeError, ConnectionResetError):
                break
        assert pool.devices[0].name == "cpu/0"


def test_tokens_are_good_for_one_session(pool: shoal.Pool) -> None:
    request = messages.AskLease(1, 32 << 20, [])
    head, lease = head_connection.ask(pool.url, request)
    assert isinstance(lease, messages.Lease)
    token = lease.devices[0].token
    with head:
        for wrong in ("", "nonsense", token + "x", token[:-1]):
            assert "not known" in refused(pool, wrong)
    wait_until(lambda: pool.devices[0].sessions == 0, 30, "the lease has ended")
    assert "not known" in refused(pool, token)  # the lease is over, and its token with it


def refused(pool: shoal.Pool, token: str, fds: int = 1) -> str:
    memory = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 4096)
    with connect(pool, "device-0") as connection:
        hello = session_messages.Hello(session_messages.our_versions(), token, 4096)
        frames.send(connection, hello, [memory] * fds)
        reply = answer(connection)
    os.close(memory)
    assert isinstance(reply, messages.Refusal)
    return reply.reason


def test_a_greeting_needs_its_descriptor(pool: shoal.Pool) -> None:
    assert "descriptor" in refused(pool, "x", fds=0)


def test_descriptors_do_not_pile_up(pool: shoal.Pool) -> None:
    server = processes.server_pids(pool.url)[0]

    def count() -> int:
        return len(os.listdir(f"/proc/{server}/fd"))

    refused(pool, "x")
    before = count()
    for _ in range(10):
        refused(pool, "x")
        with connect(pool, "device-0") as connection:
            socket.send_fds(connection, [b"\x01\x00\x00\x00\xc1"], [0] * 5)
            answer(connection)
    wait_until(lambda: count() <= before, 30, "the server's descriptors are closed")


def test_versions_that_differ_are_refused_with_both(pool: shoal.Pool) -> None:
    ours = session_messages.our_versions()
    theirs = session_messages.Versions("0.0.1", "2.0.0", 77)
    with connect(pool, "device-0") as connection:
        frames.send(connection, session_messages.Hello(theirs, "x", 0), [0])
        reply = answer(connection)
    assert isinstance(reply, messages.Refusal)
    for text in (ours.shoal, ours.torch, theirs.shoal, theirs.torch, "77"):
        assert text in reply.reason


@pytest.mark.parametrize("host_bytes", [0, 1, 4096, 2**40, 2**63 - 1])
def test_host_regions_that_are_not_what_they_seem(pool: shoal.Pool, host_bytes: int) -> None:
    head, lease = head_connection.ask(pool.url, messages.AskLease(1, 32 << 20, []))
    assert isinstance(lease, messages.Lease)
    unsealed = os.memfd_create("x")  # it could shrink under the worker
    os.ftruncate(unsealed, 4096)
    with head, connect(pool, "device-0") as connection:
        hello = session_messages.Hello(
            session_messages.our_versions(), lease.devices[0].token, host_bytes
        )
        frames.send(connection, hello, [unsealed])
        assert isinstance(answer(connection), messages.Refusal)
    os.close(unsealed)


def test_many_sessions_come_and_go(pool: shoal.Pool) -> None:
    for _ in range(15):
        with RawClient(pool.url) as client:
            assert processes.alive(client.worker_pid)
    wait_until(lambda: pool.devices[0].sessions == 0, 30, "all sessions are over")
