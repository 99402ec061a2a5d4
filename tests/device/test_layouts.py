"""Layouts that are written down twice are the same on both sides."""

from __future__ import annotations

import mmap
import struct

import pytest

from shoal import _core
from shoal.pool.base import limits
from shoal.pool.node.shares import share_server
from shoal.pool.wire import session_messages
from tests.support import data_client, raw_client
from tests.support.raw_client import Kind

FRAMES = {
    "progress": (0x100, "done failed heartbeat"),
    "data": (0x101, "bytes lane"),
    "goodbye": (0x102, "bytes text…"),
    "end": (0x103, "there"),
    "wait": (0x104, "unused"),
    "moment": (0x105, "event ns waited_ns"),
    "chunk": (0x101, "bytes"),
}


def fields(words: str) -> list[tuple[str, int, int]]:
    """Return name, offset and bytes of each field of a layout as raw_client.WORDS states it."""
    found: list[tuple[str, int, int]] = []
    at = 8  # behind the header
    for word in words.split():
        halves = word.split("|")
        for name in halves:
            size = 0 if name.endswith("…") else 8 // len(halves)
            found.append((name.removesuffix("…"), at, size))
            at = at + size if size and at >= 0 else -1
    return found


def test_the_raw_client_knows_every_kind_by_its_number() -> None:
    assert {kind.name.lower(): int(kind) for kind in Kind} == {
        name: number for name, (number, _) in _core.MESSAGES.items()
    }
    assert set(raw_client.WORDS) == set(Kind)


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_the_raw_client_writes_the_fields_of_a_kind_where_they_are(kind: Kind) -> None:
    assert fields(raw_client.WORDS[kind]) == _core.MESSAGES[kind.name.lower()][1]


def test_frames_between_machines() -> None:
    stated = {name: (number, fields(words)) for name, (number, words) in FRAMES.items()}
    assert stated == _core.FRAMES


def test_the_data_client_knows_its_kinds() -> None:
    for name, number in data_client.KIND.items():
        assert _core.MESSAGES[name][0] == number


def test_a_header_counts_its_words() -> None:
    assert raw_client.message(Kind.COPY_IN, 1, 2, 3, flags=5)[0] == 32 | (8 << 32) | (5 << 48)


def test_processes_without_torch_state_what_the_core_states() -> None:
    # The agent does not load the core, but a module of its constants.
    assert session_messages.DATA_MAGIC == b"SHOALDAT"
    assert (limits.SESSIONS_MAX, limits.DEVICES_PER_LEASE_MAX) == (2047, 32)
    assert share_server.CONTROL_BYTES == mmap.PAGESIZE
    page = share_server.ControlPage()
    try:
        page.publish(7)
        page.revoke()
        with mmap.mmap(page.fd, share_server.CONTROL_BYTES, prot=mmap.PROT_READ) as seen:
            words = struct.unpack_from("=2Q", seen)
        assert words == (1, 7)  # revoked, holder
    finally:
        page.close()


def test_a_descriptor_comes_with_its_kind_and_number() -> None:
    assert struct.unpack("=QQ", _core.passed_connection()) == (1, 0)
    assert struct.unpack("=QQ", _core.passed_reader_memory(9)) == (2, 9)
