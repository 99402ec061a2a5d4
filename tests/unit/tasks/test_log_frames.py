"""A task's log: whole frames from any pieces, also after its beginning was dropped."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.tasks.log_frames import END, ERR, HEADER, OUT, Decoder, Frame, LogError, encode

LINES = st.lists(st.tuples(st.sampled_from([OUT, ERR]), st.binary(max_size=50)), max_size=12)


def written(lines: list[tuple[int, bytes]]) -> tuple[list[Frame], bytes]:
    frames, data = [], b""
    for stream, text in lines:
        frames.append(Frame(len(data), float(len(data)), stream, text))
        data += encode(len(data), float(len(data)), stream, text)
    return frames, data


@given(LINES, st.lists(st.integers(0, 1000), max_size=8))
def test_frames_survive_any_cutting(lines: list[tuple[int, bytes]], cuts: list[int]) -> None:
    frames, data = written([*lines, (END, b"")])
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    decoder, found = Decoder(), []
    for start, stop in itertools.pairwise(edges):
        found += decoder.feed(start, data[start:stop])
    assert found == frames
    assert decoder.ended
    assert decoder.position == frames[-1].following


@given(LINES.filter(bool), st.data())
def test_a_dropped_beginning_is_counted(
    lines: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    frames, text = written(lines)
    first = data.draw(st.integers(0, len(frames) - 1))
    start = frames[first].position
    decoder = Decoder()
    assert decoder.feed(start, text[start:]) == frames[first:]
    assert decoder.dropped_bytes == start


@given(st.binary(max_size=200))
def test_any_bytes_are_frames_or_an_error(data: bytes) -> None:
    with contextlib.suppress(LogError):
        Decoder().feed(0, data)


def test_bytes_that_come_again_are_an_error() -> None:
    decoder = Decoder()
    decoder.feed(0, encode(0, 1.0, OUT, b"x"))
    with pytest.raises(LogError, match="instead of"):
        decoder.feed(0, b"")
    assert HEADER.size == 21
