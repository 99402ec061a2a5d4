"""Frames: how messages and descriptors go over a connection.

A frame is four bytes of length (little endian) and one msgpack map. Descriptors ride on the first
byte of a frame (Unix sockets only). A frame that is too long, malformed or of a kind that does not
belong to the link raises ProtocolError; the process that read it then closes the connection.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec.msgpack import Decoder

from shoal.errors import ProtocolError
from shoal.pool.base.limits import FRAME_BYTES_MAX, READ_BYTES

Kind = TypeVar("Kind")
_HEADER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size


class Closed(ProtocolError):
    """The other side closed the connection."""

    def __init__(self) -> None:
        super().__init__("the other side closed the connection")


class Silence(ProtocolError):
    """No whole message came in time. The connection still works."""

    def __init__(self) -> None:
        super().__init__("no whole message came in time")


class Broken(ProtocolError):
    """The connection broke."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"the connection broke: {error}")
        self.error = error


def encode(message: msgspec.Struct) -> bytes:
    """Return the frame of a message."""
    body = msgspec.msgpack.encode(message)
    return _HEADER.pack(len(body)) + body


def body_length(header: bytes | bytearray, frame_bytes_max: int) -> int:
    """Return the length that a frame's header announces."""
    length = int(_HEADER.unpack_from(header)[0])
    if length > frame_bytes_max:
        raise ProtocolError(f"a frame of {length} bytes is over the limit of {frame_bytes_max}")
    return length


def decode(body: bytes, kinds: Decoder[Kind]) -> Kind:
    """Return the message in a frame's body, which must be one of the link's kinds."""
    try:
        return kinds.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a frame is malformed: {error}") from None


def send(sock: socket.socket, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
    """Send one frame and its descriptors."""
    frame = encode(message)
    sent = socket.send_fds(sock, [frame], list(fds)) if fds else 0
    if sent < len(frame):  # even an empty send fails if the other side has answered and closed
        sock.sendall(frame[sent:])


def receive(sock: socket.socket, kinds: Decoder[Kind], fds_max: int = 0) -> tuple[Kind, list[int]]:
    """Wait, as long as the socket's time-out allows, for one frame and its descriptors."""
    inbox = Inbox(fds_max)
    try:
        while True:
            alive = inbox.read(sock)
            message = inbox.next(kinds)
            if message is not None:
                return message, inbox.fds
            if not alive:
                raise Closed
    except TimeoutError:
        inbox.close_fds()
        raise Silence from None
    except OSError as error:
        inbox.close_fds()
        raise Broken(error) from None
    except ProtocolError:
        inbox.close_fds()
        raise


class Inbox:
    """Collects the bytes of one connection until whole frames are there."""

    def __init__(self, fds_max: int = 0, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.fds: list[int] = []
        self._fds_max = fds_max
        self._frame_bytes_max = frame_bytes_max
        self._bytes = bytearray()

    def read(self, sock: socket.socket) -> bool:
        """Read what is there. Return False if the other side has closed."""
        if self._fds_max == 0:
            data = sock.recv(READ_BYTES)
        else:
            space = socket.CMSG_LEN(self._fds_max * array.array("i").itemsize)
            data, ancillary, _, _ = sock.recvmsg(READ_BYTES, space, socket.MSG_CMSG_CLOEXEC)
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    whole = len(payload) // 4 * 4
                    self.fds += array.array("i", payload[:whole])
            if len(self.fds) > self._fds_max:
                raise ProtocolError(f"more than {self._fds_max} descriptors came")
        self._bytes += data
        return bool(data)

    @property
    def begun(self) -> bool:
        """Whether the inbox holds bytes of a frame that is not whole."""
        return bool(self._bytes)

    def close_fds(self) -> None:
        """Close the received descriptors that nobody took."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    def next(self, kinds: Decoder[Kind]) -> Kind | None:
        """Return the next whole message, or None if there is none."""
        if len(self._bytes) < HEADER_BYTES:
            return None
        end = HEADER_BYTES + body_length(self._bytes, self._frame_bytes_max)
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[HEADER_BYTES:end])
        del self._bytes[:end]
        return decode(body, kinds)
