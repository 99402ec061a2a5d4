"""How messages go over a connection: frames, and the descriptors that ride on them.

A frame is four bytes of length (little endian) and one msgpack map. Descriptors ride on the first
byte of a frame (Unix sockets only). A frame that is too long, malformed or of an unknown kind raises
ProtocolError; the connection is then closed by whoever read it.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence

import msgspec

from shoal.errors import ProtocolError
from shoal.pool.base.limits import FRAME_BYTES_MAX
from shoal.pool.wire.messages import Message

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One frame."""
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


def decode(body: bytes) -> Message:
    """The message in a frame's body."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a frame is malformed: {error}") from None


def send(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Sends one frame; descriptors go with it."""
    frame = encode(message)
    sent = socket.send_fds(sock, [frame], list(fds)) if fds else 0
    if sent < len(frame):  # even an empty send fails if the other side has answered and closed
        sock.sendall(frame[sent:])


def receive(sock: socket.socket, fds_max: int = 0) -> tuple[Message, list[int]]:
    """Waits (as long as the socket's time-out allows) for one frame and its descriptors."""
    inbox = Inbox(fds_max)
    try:
        while True:
            alive = inbox.read(sock)
            message = inbox.next()
            if message is not None:
                return message, inbox.fds
            if not alive:
                raise ProtocolError("the other side closed the connection")
    except TimeoutError:
        inbox.close_fds()
        raise ProtocolError("the other side did not answer in time") from None
    except OSError as error:
        inbox.close_fds()
        raise ProtocolError(f"the connection broke: {error}") from None
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
        """Reads what is there. False if the other side has closed."""
        if self._fds_max == 0:
            data = sock.recv(64 * 1024)
        else:
            space = socket.CMSG_LEN(self._fds_max * array.array("i").itemsize)
            data, ancillary, _, _ = sock.recvmsg(64 * 1024, space, socket.MSG_CMSG_CLOEXEC)
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
        """Whether a part of a frame has come."""
        return bool(self._bytes)

    def close_fds(self) -> None:
        """Lets go of the descriptors that came, for a reader that does not want them."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    def next(self) -> Message | None:
        """The next whole message, if there is one."""
        if len(self._bytes) < 4:
            return None
        length = int(struct.unpack_from("<I", self._bytes)[0])
        if length > self._frame_bytes_max:
            raise ProtocolError(
                f"a frame of {length} bytes is over the limit of {self._frame_bytes_max}"
            )
        if len(self._bytes) < 4 + length:
            return None
        body = bytes(self._bytes[4 : 4 + length])
        del self._bytes[: 4 + length]
        return decode(body)
