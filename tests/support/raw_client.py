"""A client that speaks the op stream by hand, and so can say what no real client would.

Kinds and layouts are written down here a second time, by hand, as a witness of what the core says:
tests/device/test_layouts.py compares the two.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Sequence
from enum import IntEnum

from shoal.pool.client import head_connection
from shoal.pool.wire import frames, messages, session_messages
from tests.support import wire
from tests.support.waiting import wait_until

RING_BYTES = 1 << 20
CONTROL_BYTES = 256
WORD = struct.Struct("<Q")
MASK = 2**64 - 1
F_ADD_SEALS, SEALS = 1033, 0x1 | 0x2 | 0x4  # seal, shrink, grow


class Kind(IntEnum):
    PREPARE = 1
    CALL = 2
    BIND = 3
    ALLOCATE = 4
    FREE = 5
    ADOPT = 6
    WRITE = 7
    COPY_IN = 8
    COPY_OUT = 9
    COPY_WITHIN = 10
    READ = 11
    LOCATE = 12
    SEED = 13
    GENERATOR_GET = 14
    GENERATOR_SET = 15
    GENERATOR_DROP = 16
    EVENT_RECORD = 17
    EVENT_ELAPSED = 18
    EVENT_DROP = 19
    SYNC = 20
    STATS = 21
    FORGET = 22
    BACKWARD = 23
    GRAPH_DROP = 24
    TRIM = 25
    EXPORT = 26
    FETCH = 27
    GENERATOR_SAVE = 28
    GENERATOR_LOAD = 29
    SHARE = 30
    OPEN = 31
    UNSHARE = 32
    FETCH_ADD = 33
    LOAD = 34
    SETTINGS = 35


# The words of each kind after the header. "a|b" are the lower and the upper half of a word; "a…" is of
# any length, in whole words.
WORDS = {
    Kind.PREPARE: "id|name_bytes argument_words|output_words name… arguments… outputs…",
    Kind.CALL: "id|output_count graph immediates… outputs…",  # graph: only with flag 2
    Kind.BIND: "output_count outputs…",
    Kind.ALLOCATE: "address bytes",
    Kind.FREE: "segments…",
    Kind.ADOPT: "address bytes host",
    Kind.WRITE: "address bytes data…",
    Kind.COPY_IN: "address bytes host",
    Kind.COPY_OUT: "address bytes host",
    Kind.COPY_WITHIN: "to from bytes",
    Kind.READ: "address bytes",
    Kind.LOCATE: "address bytes",
    Kind.SEED: "generator seed",
    Kind.GENERATOR_GET: "generator",
    Kind.GENERATOR_SET: "generator bytes state…",
    Kind.GENERATOR_DROP: "generator",
    Kind.EVENT_RECORD: "event",
    Kind.EVENT_ELAPSED: "start end",
    Kind.EVENT_DROP: "event",
    Kind.SYNC: "",
    Kind.STATS: "",
    Kind.FORGET: "",
    Kind.BACKWARD: "graph gradient_count|output_count gradients… outputs…",
    Kind.GRAPH_DROP: "graph",
    Kind.TRIM: "",
    Kind.EXPORT: "address peer reading",
    Kind.FETCH: "to from bytes peer written exported",
    Kind.GENERATOR_SAVE: "generator address",
    Kind.GENERATOR_LOAD: "generator address",
    Kind.SHARE: "address bytes number mode participant",
    Kind.OPEN: "address bytes number mode participant",
    Kind.UNSHARE: "address",
    Kind.FETCH_ADD: "to from bytes peer written exported dtype",
    Kind.LOAD: "address bytes reader offset",
    Kind.SETTINGS: "default_dtype flags "
    + "precision " * 7
    + "attention " * 5
    + "cudnn_benchmark_limit cudnn_depthwise fp16_reduction bf16_reduction linalg blas rocm_attention",
}


class Error(IntEnum):
    NONE = 0
    RUNTIME = 1
    NOT_IMPLEMENTED = 5
    OUT_OF_MEMORY = 6
    PROTOCOL = 8


class Ended(Exception):
    """The worker has ended the session."""


def header(kind: int, words: int, flags: int = 0) -> int:
    return ((1 + words) * 8) | (kind << 32) | (flags << 48)


def message(kind: int, *words: int, flags: int = 0) -> list[int]:
    return [header(kind, len(words), flags), *words]


def text_words(text: bytes) -> list[int]:
    padded = text + bytes(-len(text) % 8)
    return [WORD.unpack_from(padded, i)[0] for i in range(0, len(padded), 8)]


def tag(kind: int, a: int = 0, b: int = 0, c: int = 0, n: int = 0) -> int:
    return kind | (a << 8) | (b << 16) | (c << 24) | (n << 32)


def tensor(*shape: int, dtype: int = 6, strides: Sequence[int] | None = None) -> list[int]:
    """The template of a tensor argument; dtype 6 is float32."""
    if strides is None:
        strides = [1] * len(shape)
        for i in range(len(shape) - 2, -1, -1):
            strides[i] = strides[i + 1] * shape[i + 1]
    words = [tag(2, dtype, len(shape)), *shape, *strides]
    return [w & MASK for w in words]


def prepare(number: int, name: str, template: Sequence[int], outputs: Sequence[int]) -> list[int]:
    encoded = name.encode()
    first = number | (len(encoded) << 32)
    second = len(template) | (len(outputs) << 32)
    return message(Kind.PREPARE, first, second, *text_words(encoded), *template, *outputs)


class Region:
    """A mapped ring."""

    def __init__(self, fd: int) -> None:
        self.map = mmap.mmap(fd, CONTROL_BYTES + RING_BYTES)
        # Whole words in one store: struct would write byte by byte, and the worker read half a number.
        self.words = memoryview(self.map).cast("Q")

    def get(self, at: int) -> int:
        return int(self.words[at // 8])

    def put(self, at: int, value: int) -> None:
        self.words[at // 8] = value & MASK


class RawClient:
    """A session of its own, without the core."""

    def __init__(self, url: str, memory_bytes: int = 32 << 20, host_bytes: int = 1 << 20) -> None:
        self.head, lease = head_connection.ask(url, messages.AskLease(1, memory_bytes, []))
        assert isinstance(lease, messages.Lease)
        granted = lease.devices[0]
        self.session = granted.session
        host_fd = os.memfd_create("raw", os.MFD_ALLOW_SEALING)
        os.ftruncate(host_fd, host_bytes)
        fcntl.fcntl(host_fd, F_ADD_SEALS, SEALS)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(30)
        self.socket.connect(granted.address)
        hello = session_messages.Hello(session_messages.our_versions(), granted.token, host_bytes)
        frames.send(self.socket, hello, [host_fd])
        welcome, fds = frames.receive(self.socket, wire.ANY, fds_max=4)
        assert isinstance(welcome, session_messages.Welcome), welcome
        self.socket.setblocking(False)
        self.worker_pid = welcome.worker_pid
        self.requests, self.replies = Region(fds[0]), Region(fds[1])
        for fd in (*fds, host_fd):
            os.close(fd)
        self.tail = 0
        self.read_at = 0
        self.sequence = 0

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.head.close()

    def address(self, slot: int, offset: int = 0) -> int:
        return (self.session << 52) | (slot << 30) | offset

    def ended(self) -> bool:
        """Whether the worker has closed the session's socket."""
        try:
            return self.socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send(self, words: Sequence[int]) -> int:
        """Publishes one message, whatever it says, and returns its number."""
        size = len(words) * 8
        at = self.tail % RING_BYTES
        if at + size > RING_BYTES:
            self._wait_for_room(RING_BYTES - at)
            self.requests.put(CONTROL_BYTES + at, RING_BYTES - at)  # padding
            self.tail += RING_BYTES - at
            at = 0
        self._wait_for_room(size)
        data = struct.pack(f"<{len(words)}Q", *(w & MASK for w in words))
        self.requests.map[CONTROL_BYTES + at : CONTROL_BYTES + at + size] = data
        self.tail += size
        self.requests.put(0, self.tail)
        self.sequence += 1
        return self.sequence

    def _wait_for_room(self, size: int) -> None:
        def room() -> bool:
            if self.ended():
                raise Ended
            return self.tail + size - self.requests.get(64) <= RING_BYTES

        wait_until(room, 30, "the worker takes messages")

    def receive(self) -> tuple[int, int, list[int]]:
        """The next reply: error kind, number of the request, payload."""

        def there() -> bool:
            if self.replies.get(0) > self.read_at:
                return True
            if self.ended():
                raise Ended
            return False

        while True:
            wait_until(there, 30, "the worker replies")
            at = self.read_at % RING_BYTES
            first = self.replies.get(CONTROL_BYTES + at)
            size, kind = first & 0xFFFFFFFF, (first >> 32) & 0xFFFF
            words = [self.replies.get(CONTROL_BYTES + at + i) for i in range(0, size, 8)]
            self.read_at += size
            self.replies.put(64, self.read_at)
            if kind != 0:
                return first >> 48, words[1], words[2:]

    def request(self, words: Sequence[int]) -> tuple[int, list[int]]:
        """Sends a message that has a reply; skips replies to earlier ones."""
        sequence = self.send(words)
        while True:
            error, answered, payload = self.receive()
            if answered == sequence:
                return error, payload

    def outcome(self, words: Sequence[int]) -> tuple[int, str]:
        """Sends a message and asks how it went: kind and text of the error."""
        self.send(words)
        last = self.send(message(Kind.SYNC))
        error, answered, payload = self.receive()
        while answered != last:  # the message's own reply, if it has one
            kept = error, payload
            error, answered, payload = self.receive()
            if error == Error.NONE:
                error, payload = kept
        if error == Error.NONE:
            return error, ""
        raw = struct.pack(f"<{len(payload) - 4}Q", *payload[4:])
        return error, raw[: payload[2]].decode(errors="replace")
