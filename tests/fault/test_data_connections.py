"""Hostile bytes on the data connections of a session between machines: a named end of that session,
and nothing else happens.
"""

from __future__ import annotations

import random
import secrets
import struct
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal import _core
from shoal.pool.wire import tls
from tests.support import processes
from tests.support.data_client import ANSWER, KIND, DataClient, message, until_end
from tests.support.standing import StandingPool
from tests.support.waiting import wait_until

MiB = 2**20


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    directory = tmp_path_factory.mktemp("data")
    with StandingPool(directory, "cpu,memory=256MiB,threads=1", listen=True) as made:
        yield made


def gone(raw: DataClient) -> None:
    wait_until(lambda: not processes.alive(raw.worker_pid), 8, "the worker has ended")


def still_serves(pool: StandingPool, identity: tls.Identity) -> None:
    with shoal.connect(pool.network_url, memory=MiB, transport="network"):
        assert torch.ones(3, device="shoal").sum().item() == 3


def test_a_session_by_hand_and_its_end(raw: DataClient) -> None:
    """The frames are what the documents say: a sync is answered behind progress."""
    up, down = raw.both()
    up.sendall(message(KIND["sync"]))
    heard = b""
    while struct.pack("<Q", 16 | KIND["sync"] << 32) not in heard:
        heard += down.recv(4096)
    up.close()
    gone(raw)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (b"\xff" * 64, b"out of range"),
        (struct.pack("<Q", 12 | KIND["sync"] << 32), b"out of range"),
        (struct.pack("<Q", (1 << 20) | KIND["call"] << 32), b"out of range"),
        (message(0), b"does not exist"),
        (message(999), b"does not exist"),
        (message(KIND["adopt"], 1 << 52, 4096, 0), b"cannot be adopted"),
        (message(KIND["copy_in"], 1 << 52, 2 * MiB, 0), b"chunks of 1 to"),
        (message(KIND["copy_in"], 1 << 52, 2**63, 0), b"chunks of 1 to"),
        (message(KIND["copy_in"], 1 << 52), b"bytes: the message ends too early"),
        (message(KIND["copy_in"], 1 << 52, 4096, 1), b"there is no lane 1"),
        (message(KIND["copy_in"], 1 << 52, 4096, 2**64 - 1), b"there is no lane"),
        (message(KIND["copy_out"], 1 << 52, 2**64 - 1, 0), b"chunks of 1 to"),
        (message(KIND["copy_out"], 1 << 52, 0, 0), b"chunks of 1 to"),
    ],
)
def test_a_broken_stream_ends_its_session_by_name(
    raw: DataClient, pool: StandingPool, what: bytes, reason: bytes
) -> None:
    up, down = raw.both()
    up.sendall(what)
    assert reason in until_end(down)
    gone(raw)


def test_a_host_offset_of_the_client_means_nothing(raw: DataClient) -> None:
    """An address that is not bound is the executor's to refuse; the session goes on."""
    up, down = raw.both()
    address = raw.session << 52 | 7 << 30
    up.sendall(message(KIND["copy_in"], address, 4096, 0, data=bytes(4096)))
    up.sendall(message(KIND["copy_out"], address, 4096, 2**60))
    up.sendall(message(KIND["sync"]))
    heard = b""
    while b"is not bound to memory" not in heard:
        heard += down.recv(65536)
    assert processes.alive(raw.worker_pid)


def test_bytes_by_a_lane_are_waited_for_in_the_stream(raw: DataClient) -> None:
    """What comes behind a chunk is not done before its bytes are there."""
    up, lane = raw.open("up", lane=0, lanes=1), raw.open("up", lane=1, lanes=1)
    down = raw.open("down")
    assert [one.recv(8) for one in (up, lane, down)] == [ANSWER] * 3
    address = raw.session << 52 | 7 << 30
    done = struct.pack("<Q", 16 | KIND["sync"] << 32)
    up.sendall(message(KIND["allocate"], address, 4096))
    up.sendall(message(KIND["copy_in"], address, 4096, 1) + message(KIND["sync"]))
    heard = b""
    for _ in range(3):  # heartbeats, and no reply
        heard += down.recv(4096)
    assert done not in heard
    lane.sendall(b"\x07" * 4096)
    up.sendall(message(KIND["copy_out"], address, 4096, 0))
    while done not in heard or b"\x07" * 4096 not in heard:
        heard += down.recv(65536)
    up.close()
    gone(raw)


def test_lanes_that_cannot_be(raw: DataClient) -> None:
    assert until_end(raw.open("up", lane=2, lanes=1)) == b""
    assert until_end(raw.open("up", lane=0, lanes=77)) == b""
    first = raw.open("up", lane=1, lanes=2)
    assert first.recv(8) == ANSWER
    assert until_end(raw.open("up", lane=1, lanes=2)) == b""  # it has one
    assert until_end(raw.open("up", lane=0, lanes=3)) == b""  # they were two


def test_who_may_open_a_data_connection(raw: DataClient, pool: StandingPool) -> None:
    other = pool.join(f"other-{secrets.token_hex(3)}")
    assert until_end(raw.open("up", secret=secrets.token_bytes(32))) == b""
    assert until_end(raw.open("up", identity=other)) == b""  # the secret alone is not enough
    assert until_end(raw.open("read")) == b""  # a client is no worker
    assert until_end(raw.open(77)) == b""
    assert until_end(raw.dial(secrets.token_bytes(16))) == b""  # no such session
    plain = raw.dial()
    plain.sendall(b"GET / HTTP/1.0\r\n\r\n" * 10)
    assert len(until_end(plain)) <= 7  # an alert of TLS at most
    up, _down = raw.both()
    assert until_end(raw.open("up")) == b""  # it has one
    assert processes.alive(raw.worker_pid)
    up.close()
    gone(raw)


def test_silent_connections_are_let_go(raw: DataClient, pool: StandingPool) -> None:
    """Half a prefix, half a handshake, no greeting: dropped within their deadlines."""
    import socket

    half = socket.create_connection((raw.attached.host, raw.attached.port), 10)
    half.sendall(b"SHOAL")
    named = raw.dial()
    shaken = raw.context().wrap_socket(raw.dial(), server_hostname=_core.SESSION_SERVER_NAME)
    for connection in (half, named, shaken):
        assert until_end(connection) == b""


def test_a_client_that_never_opens_them_loses_its_worker(raw: DataClient) -> None:
    raw.attached.connection.close()
    gone(raw)


def test_random_streams(pool: StandingPool, mallory: tls.Identity, raw: DataClient) -> None:
    """Whatever comes: the worker answers or ends, the device server lives."""

    @settings(max_examples=12)
    @given(st.lists(st.binary(max_size=200), max_size=8), st.integers(0, 2**32))
    def check(parts: list[bytes], seed: int) -> None:
        rng = random.Random(seed)
        with DataClient(mallory) as one:
            up, down = one.both()
            for part in parts:
                whole = part + bytes(-len(part) % 8)
                kind = rng.choice([*KIND.values(), rng.randrange(1, 40)])
                header = struct.pack("<Q", 8 + len(whole) | kind << 32)
                up.sendall(rng.choice([header + whole, part]))
            up.close()
            until_end(down)
            gone(one)

    raw.attached.connection.close()
    gone(raw)
    check()
    still_serves(pool, mallory)
