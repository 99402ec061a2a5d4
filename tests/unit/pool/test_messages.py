"""Framing: what is sent arrives, in whatever pieces; what is no frame is refused."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ProtocolError
from shoal.pool.wire import (
    data_messages,
    frames,
    join_messages,
    messages,
    node_messages,
    session_messages,
)
from shoal.pool.wire.frames import Inbox, encode
from shoal.pool.wire.session_messages import Versions
from tests.support import wire

STRUCTS: dict[type, st.SearchStrategy[Any]] = {}
built: dict[type, st.SearchStrategy[Any]] = {}


def values(kind: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Anything that a field of this type may hold."""
    match kind:
        case msgspec.inspect.IntType():
            most = kind.lt - 1 if kind.lt is not None else kind.le or 2**63 - 1
            return st.integers(kind.ge if kind.ge is not None else -(2**63), most)
        case msgspec.inspect.FloatType():
            least = kind.gt if kind.gt is not None else kind.ge
            most = kind.lt if kind.lt is not None else kind.le
            return st.floats(
                least, most, exclude_min=kind.gt is not None, exclude_max=kind.lt is not None,
                allow_nan=False,
            )  # fmt: skip
        case msgspec.inspect.StrType():
            return st.text(max_size=min(30, kind.max_length or 30))
        case msgspec.inspect.BytesType():
            return st.binary(max_size=min(100, kind.max_length or 100))
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.LiteralType():
            return st.sampled_from(kind.values)
        case msgspec.inspect.EnumType():
            return st.sampled_from(kind.cls)
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.ListType():
            return st.lists(values(kind.item_type), min_size=kind.min_length or 0, max_size=3)
        case msgspec.inspect.DictType():
            return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=3)
        case msgspec.inspect.TupleType():
            return st.tuples(*map(values, kind.item_types))
        case msgspec.inspect.UnionType():
            return st.one_of(*map(values, kind.types))
        case msgspec.inspect.StructType():
            if kind.cls not in STRUCTS:  # one that holds others of its kind is met again
                STRUCTS[kind.cls] = st.deferred(lambda: built[kind.cls])
                fields = {f.name: values(_bounded(f)) for f in kind.fields}
                built[kind.cls] = st.builds(kind.cls, **fields)
            return STRUCTS[kind.cls]
    raise AssertionError(f"no strategy for {kind}")


def _bounded(field: msgspec.inspect.Field) -> msgspec.inspect.Type:
    """Ports and counts have bounds of their own; a small positive number is within all of them."""
    if isinstance(field.type, msgspec.inspect.IntType) and (field.type.lt or field.type.le):
        least, most = max(1, field.type.ge or 1), min(500, field.type.le or 500)
        return msgspec.inspect.IntType(ge=least, le=most)
    return field.type


MESSAGES: st.SearchStrategy[msgspec.Struct] = st.one_of(
    *(values(msgspec.inspect.type_info(kind)) for kind in wire.KINDS)
)


class Bytes:
    """A socket that gives prepared pieces, then closes."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def recv(self, _: int) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""


def read_all(pieces: list[bytes]) -> list[msgspec.Struct]:
    inbox, source, found = Inbox(), Bytes([p for p in pieces if p]), []
    while inbox.read(source):  # type: ignore[arg-type]
        while (message := inbox.next(wire.ANY)) is not None:
            found.append(message)
    return found


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    left.settimeout(10)
    right.settimeout(10)
    with left, right:
        yield left, right


@given(st.lists(MESSAGES, max_size=5), st.lists(st.integers(0, 2000), max_size=8))
def test_messages_survive_any_cutting_of_the_stream(
    sent: list[msgspec.Struct], cuts: list[int]
) -> None:
    stream = b"".join(map(encode, sent))
    edges = [0, *sorted(min(c, len(stream)) for c in cuts), len(stream)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]
    assert read_all(pieces) == sent


@given(st.binary(max_size=300))
def test_any_bytes_are_messages_or_protocol_errors(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        read_all([data])


@given(MESSAGES, st.data())
def test_a_changed_byte_never_escapes_as_another_error(
    message: msgspec.Struct, data: st.DataObject
) -> None:
    frame = bytearray(encode(message))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ProtocolError):
        read_all([bytes(frame)])


def test_every_message_says_who_says_it_to_whom() -> None:
    for kind in wire.KINDS:
        assert "→" in kind.__doc__ or "Either way" in kind.__doc__, kind


@pytest.mark.parametrize(
    "message",
    [
        messages.Refusal("x" * 3000),
        messages.AskLease(1, 1, list(range(3000))),
        join_messages.Join("x" * 65, "", "", "", ""),
        messages.ReadAudit(100_000),
        node_messages.NodeRevoke(-1, 5),
        node_messages.Revoke(-1),
        session_messages.Hello(Versions("", "", 1), "", 1, 33),
        session_messages.Peers([session_messages.Peer("x", 1)] * 33, 0),
        messages.Resumed([(-1, 5)]),
        data_messages.ReadSamples(1, 1, bytes(8 * 2**14 + 1), 0, 1),
        data_messages.OpenData(1, 0, [data_messages.DataPath("/" + "x" * 2048)]),
        session_messages.ReaderReady(0, 1),
    ],
)
def test_fields_out_of_bounds_are_refused(message: msgspec.Struct) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        read_all([encode(message)])


@pytest.mark.parametrize("link", wire.LINKS)
def test_a_link_takes_its_own_messages_and_no_others(link: str) -> None:
    union, decoder = wire.LINKS[link]
    own = wire.kinds(union)
    for kind in wire.KINDS:
        tag = kind.__struct_config__.tag
        body = msgspec.msgpack.encode({"type": tag})
        try:
            known = isinstance(frames.decode(body, decoder), kind)
        except ProtocolError as error:
            known = "missing required field" in str(error)
        assert known == (kind in own), kind


def test_a_refusal_fits_its_frame() -> None:
    sent = messages.refusal("x" * 10_000)
    assert read_all([encode(sent)]) == [sent]


def test_a_frame_over_the_limit_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        read_all([struct.pack("<I", frames.FRAME_BYTES_MAX + 1)])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",  # a byte that msgpack never uses
        msgspec.msgpack.encode({"type": "Nonsense"}),
        msgspec.msgpack.encode({"type": "Revoke"}),
        msgspec.msgpack.encode({"type": "Revoke", "session": "one"}),
        msgspec.msgpack.encode([1, 2, 3]),
        b"\x81" * 5000,  # maps in maps
    ],
)
def test_malformed_bodies_are_protocol_errors(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_all([struct.pack("<I", len(body)) + body])


def test_descriptors_arrive_with_their_frame(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    read_end, write_end = os.pipe()
    frames.send(left, node_messages.Revoke(7), [write_end])
    os.close(write_end)
    message, fds = frames.receive(right, wire.ANY, fds_max=1)
    assert message == node_messages.Revoke(7)
    os.write(fds[0], b"x")
    assert os.read(read_end, 1) == b"x"
    assert not os.get_inheritable(fds[0])  # programs that the client starts must not keep it
    for fd in (read_end, *fds):
        os.close(fd)


def test_descriptors_of_a_refused_frame_are_closed(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    left, right = pair
    before = set(os.listdir("/proc/self/fd"))
    socket.send_fds(left, [struct.pack("<I", 1) + b"\xc1"], [left.fileno()])
    with pytest.raises(ProtocolError):
        frames.receive(right, wire.ANY, fds_max=1)
    assert set(os.listdir("/proc/self/fd")) == before


def test_descriptors_over_the_limit_never_stay_open(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    left, right = pair
    before = set(os.listdir("/proc/self/fd"))
    socket.send_fds(left, [encode(node_messages.Revoke(1))], [left.fileno()] * 8)
    try:
        _, fds = frames.receive(right, wire.ANY, fds_max=1)
    except ProtocolError:
        fds = []
    for fd in fds:
        os.close(fd)
    assert len(fds) <= 1
    assert set(os.listdir("/proc/self/fd")) == before


def test_silence_and_closing_are_told_apart(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    right.settimeout(0.01)
    with pytest.raises(ProtocolError, match="in time"):
        frames.receive(right, wire.ANY)
    left.close()
    with pytest.raises(ProtocolError, match="closed"):
        frames.receive(right, wire.ANY)


def test_versions_that_differ_are_both_named() -> None:
    ours = Versions("0.1.0", "2.13.0", 1)
    assert session_messages.version_mismatch(ours, ours) is None
    for other in (Versions("0.2.0", "2.13.0", 1), Versions("0.1.0", "2.14.0", 1)):
        text = session_messages.version_mismatch(other, ours)
        assert text is not None
        for version in (ours.shoal, ours.torch, other.shoal, other.torch):
            assert version in text
    assert session_messages.version_mismatch(Versions("0.1.0", "2.13.0", 2), ours) is not None
