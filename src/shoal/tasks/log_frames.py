"""The form of a task's log: frames with position, time and stream, one after the other. Pure.

A position counts the bytes of the log from its beginning, headers included, so a reader can go on
from any position that it has reached, in whatever pieces the bytes come. The first bytes of a log that
has grown too long are dropped; the positions of the rest stay.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

HEADER = struct.Struct("<QdBI")  # position, Unix time, stream, bytes
END, OUT, ERR = 0, 1, 2  # streams; END is the last frame, after both streams have ended
FRAME_BYTES_MAX = 64 * 1024  # of a frame's data


class LogError(ValueError):
    """The bytes are not a task's log."""


@dataclass(frozen=True, slots=True)
class Frame:
    position: int
    at: float  # Unix time
    stream: int
    data: bytes

    @property
    def following(self) -> int:
        """The position of the next frame."""
        return self.position + HEADER.size + len(self.data)


def encode(position: int, at: float, stream: int, data: bytes) -> bytes:
    return HEADER.pack(position, at, stream, len(data)) + data


@dataclass
class Decoder:
    """Takes the bytes of a log in pieces and returns whole frames.

    >>> decoder = Decoder()
    >>> [f.data for f in decoder.feed(0, encode(0, 1.0, OUT, b"hello"))]
    [b'hello']
    """

    position: int = 0  # of the next byte that it wants
    ended: bool = False
    dropped_bytes: int = 0  # that the log no longer had
    _bytes: bytearray = field(default_factory=bytearray)

    def feed(self, position: int, data: bytes) -> list[Frame]:
        """Take bytes from `position`. A gap before them is what the log has dropped."""
        if position < self.position or (position > self.position and not data):
            raise LogError(f"the log goes on at {position} instead of {self.position}")
        if position > self.position:
            self.dropped_bytes += position - self.position + len(self._bytes)
            self._bytes.clear()
        self._bytes += data
        self.position = position + len(data)
        start = self.position - len(self._bytes)
        found, at = [], 0
        while len(self._bytes) - at >= HEADER.size and not self.ended:
            where, time, stream, length = HEADER.unpack_from(self._bytes, at)
            if where != start + at or stream not in (END, OUT, ERR) or length > FRAME_BYTES_MAX:
                raise LogError(f"no frame begins at {start + at}")
            if len(self._bytes) - at < HEADER.size + length:
                break
            body = bytes(self._bytes[at + HEADER.size : at + HEADER.size + length])
            found.append(Frame(where, time, stream, body))
            at += HEADER.size + length
            self.ended = stream == END
        del self._bytes[:at]
        return found
