"""A client trusts no worker: what it says on the data connections is checked, and ends the session."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal import _core
from shoal.pool.access.certificates import Authority
from shoal.pool.wire import tls
from tests.support import processes
from tests.support.data_client import ANSWER, KIND, message
from tests.support.waiting import wait_until

PROGRESS, DATA, GOODBYE, SYNC = 0x100, 0x101, 0x102, 20
RUNTIME_ERROR = 1  # in the flags of a reply
SECRET = bytes(range(32))
MiB = 2**20
CHUNK_BYTES = 2**18
RING_CONTROL_BYTES = 256  # in front of a ring's messages; its first word is the tail


def frame(kind: int, *words: int, size: int | None = None) -> bytes:
    header = (8 * (1 + len(words)) if size is None else size) | kind << 32
    return struct.pack(f"<{1 + len(words)}Q", header, *words)


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> tuple[tls.Identity, tls.Identity]:
    """A node and a client of one pool."""
    directory = tmp_path_factory.mktemp("authority")
    authority = Authority.open(directory, "pool")
    return tuple(  # type: ignore[return-value]
        authority.own_identity(directory, role, "me", 0.0) for role in ("node", "client")
    )


class FakeWorker:
    """The far end of a link, in this process: greets as a worker does, and then says anything."""

    def __init__(
        self,
        node: tls.Identity,
        client: tls.Identity,
        server_name: str = "me.node.shoal",
        lanes: int = 0,
    ) -> None:
        pairs = [socket.create_server(("127.0.0.1", 0)) for _ in range(2 + lanes)]
        self.heard: list[bytes] = []
        self.connections: dict[int, ssl.SSLSocket] = {}  # by purpose
        self.lanes: dict[int, ssl.SSLSocket] = {}  # beside the stream down
        context = tls.server_context(node)

        def greet(listener: socket.socket) -> None:
            plain, _ = listener.accept()
            with contextlib.suppress(OSError):
                connection = context.wrap_socket(plain, server_side=True)
                greeting = connection.recv(40)
                self.heard.append(greeting)
                purpose, member = struct.unpack_from("<II", greeting, 32)
                lane = member & 0xFFFF
                if lane:
                    self.lanes[lane] = connection
                else:
                    self.connections[purpose] = connection
                connection.sendall(ANSWER)

        threads = [threading.Thread(target=greet, args=(pair,)) for pair in pairs]
        for thread in threads:
            thread.start()
        ends = [socket.create_connection(pair.getsockname()).detach() for pair in pairs]
        try:
            self.link = _core.ClientLink(
                up_fds=ends[:1],
                down_fds=ends[1:],
                key=client.key,
                certificate=client.certificate,
                authority=client.authority,
                server_name=server_name,
                secret=SECRET,
            )
        finally:
            for pair in pairs:
                pair.close()
            for thread in threads:
                thread.join()

    def say(self, what: bytes) -> None:
        with contextlib.suppress(OSError):
            self.connections[2].sendall(what)

    def announce_chunk(self) -> None:
        """The client asks for a chunk, and hears that lane 1 has its bytes, which do not come."""
        self.memory = ctypes.create_string_buffer(CHUNK_BYTES)
        asked = message(KIND["copy_out"], 1 << 52, CHUNK_BYTES, ctypes.addressof(self.memory))
        requests, _replies, progress, _locations = self.link.fds()
        for fd in (_replies, _locations):
            os.close(fd)
        with open(requests, "r+b") as file, mmap.mmap(file.fileno(), 0) as ring:
            ring[RING_CONTROL_BYTES : RING_CONTROL_BYTES + len(asked)] = asked
            ring[:8] = struct.pack("<Q", len(asked))
        self.progress = mmap.mmap(progress, 0)
        os.close(progress)
        assert self.connections[1].recv(len(asked))[:16] == asked[:16]
        self.say(frame(DATA, CHUNK_BYTES, 1))

    def done(self) -> int:
        """The last message that the client holds to be done."""
        return int.from_bytes(self.progress[:8], "little")

    def close(self) -> None:
        self.link.stop()
        for connection in [*self.connections.values(), *self.lanes.values()]:
            connection.close()


@contextlib.contextmanager
def fake(identities: tuple[tls.Identity, tls.Identity], lanes: int = 0) -> Iterator[FakeWorker]:
    worker = FakeWorker(*identities, lanes=lanes)
    try:
        yield worker
    finally:
        worker.close()


def test_a_link_says_its_secret_and_its_purpose(
    identities: tuple[tls.Identity, tls.Identity],
) -> None:
    with fake(identities) as worker:
        said = sorted(worker.heard)
        assert said == [SECRET + struct.pack("<II", purpose, 0) for purpose in (1, 2)]
        assert worker.link.failure() == ""
        for fd in worker.link.fds():
            os.close(fd)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (frame(DATA, 4096, 0), "nobody asked for"),
        (frame(DATA, 4096, 1), "nobody asked for"),
        (frame(DATA, 4096), "unknown kind"),
        (frame(SYNC, 1, size=8), "a frame of 8 bytes"),
        (frame(SYNC, 1, size=2**31), "bytes"),
        (frame(SYNC, 1, size=20), "a frame of 20 bytes"),
        (frame(0x200, 1), "unknown kind"),
        (frame(PROGRESS, 1), "unknown kind"),
        (frame(GOODBYE, 2**40, 0), "unknown kind"),
        (frame(GOODBYE, 4, int.from_bytes(b"full", "little")), "ended the session: full"),
    ],
)
def test_what_a_worker_may_not_say(
    identities: tuple[tls.Identity, tls.Identity], said: bytes, reason: str
) -> None:
    with fake(identities) as worker:
        worker.say(said)
        wait_until(lambda: reason in worker.link.failure(), 5, reason)


def test_a_worker_that_is_not_who_it_must_be(
    identities: tuple[tls.Identity, tls.Identity], tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="certificate was refused"):
        FakeWorker(*identities, server_name="other.node.shoal")
    foreign = Authority.open(tmp_path, "foreign").own_identity(tmp_path, "node", "me", 0.0)
    with pytest.raises(RuntimeError, match="certificate was refused"):
        FakeWorker(foreign, identities[1])
    with pytest.raises(RuntimeError, match="certificate was refused"):
        FakeWorker(identities[1], identities[1])  # a client's certificate serves nobody


def test_any_bytes_of_a_worker(identities: tuple[tls.Identity, tls.Identity]) -> None:
    @settings(max_examples=25)
    @given(st.lists(st.binary(max_size=64), max_size=6))
    def check(parts: list[bytes]) -> None:
        with fake(identities) as worker:
            for part in parts:
                worker.say(part)
            worker.connections[2].close()
            wait_until(lambda: worker.link.failure() != "", 30, "the end is noticed")

    check()


def test_progress_that_waits_for_a_slow_chunk_is_not_hoarded(
    identities: tuple[tls.Identity, tls.Identity],
) -> None:
    """Only the latest counts, so half a million cost no more than one, which is not lost."""
    with fake(identities, lanes=1) as worker:
        worker.announce_chunk()
        before = processes.resident_bytes(os.getpid())
        frames, batch = 2**19, 512
        for first in range(1, frames, batch):
            worker.say(b"".join(frame(PROGRESS, n, 0, n) for n in range(first, first + batch)))
            worker.lanes[1].sendall(b"\x07")  # it drips: the lane is not silent
        heartbeat = slice(64, 72)  # of the progress page; it waits for no chunk
        last = frames.to_bytes(8, "little")
        wait_until(lambda: worker.progress[heartbeat] == last, 30, "all frames were read")
        assert worker.done() == 0  # the chunk is not there
        assert processes.resident_bytes(os.getpid()) - before < 16 * MiB
        worker.lanes[1].sendall(b"\x07" * (CHUNK_BYTES - frames // batch))
        wait_until(lambda: worker.done() == frames, 30, "the chunk is there")
        assert worker.memory.raw == b"\x07" * CHUNK_BYTES
        assert worker.link.failure() == ""


def flood(connection: ssl.SSLSocket, what: bytes, times: int) -> None:
    for _ in range(times):
        connection.send(what)


@contextlib.contextmanager
def attached(identities: tuple[tls.Identity, tls.Identity]) -> Iterator[FakeWorker]:
    """A lease of this program whose only device is the worker."""
    here, there = socket.socketpair()
    with fake(identities) as worker, there:
        member = _core.MemberOptions(
            socket=here.detach(),
            fds=worker.link.fds(),
            arena_bytes=0,
            memory_bytes=MiB,
            spill_bytes=0,
            name="far",
            is_cpu=False,
            link=worker.link,
        )
        _core.attach(7, [member])
        try:
            yield worker
        finally:
            _core.detach()


def test_replies_that_nobody_asked_for_end_the_session(
    identities: tuple[tls.Identity, tls.Identity],
) -> None:
    """Those for other threads are kept for them, but not without end."""
    with attached(identities) as worker:
        worker.say(b"".join(frame(SYNC, number) for number in range(1000, 6000)))
        with pytest.raises(shoal.DeviceLostError, match="nobody asked for"):
            _core.synchronize(0)


@pytest.mark.parametrize("payload", [(), (1, 0), (1, 0, 2**40, 0), (1, 0, 8, 0), (1, 0, 0, 0, 0)])
def test_a_malformed_error_ends_the_device(
    identities: tuple[tls.Identity, tls.Identity], payload: tuple[int, ...]
) -> None:
    with attached(identities) as worker:
        error = SYNC | RUNTIME_ERROR << 16
        worker.say(b"".join(frame(error, number, *payload) for number in range(1, 9)))
        with pytest.raises(shoal.DeviceLostError, match="a malformed reply") as lost:
            _core.synchronize(0)
        assert lost.value.device == "far"


def test_replies_that_wait_for_a_slow_chunk_stop_their_sender(
    identities: tuple[tls.Identity, tls.Identity],
) -> None:
    """However small they are. The link can still be closed."""
    with fake(identities, lanes=1) as worker:
        worker.announce_chunk()
        down = worker.connections[2]
        down.settimeout(1)
        replies = frame(SYNC, 1) * 512
        with pytest.raises(TimeoutError):
            flood(down, replies, times=32 * MiB // len(replies))
