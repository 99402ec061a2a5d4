"""Everything that is said in a pool outside of the op streams, and how it is framed.

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

FRAME_BYTES_MAX = 256 * 1024


class Versions(msgspec.Struct, frozen=True):
    """What must be the same for client and device server."""

    shoal: str
    torch: str
    protocol: int


class DeviceInfo(msgspec.Struct, frozen=True):
    """A device as the head knows it."""

    number: int
    name: str
    device: str
    memory_bytes: int
    free_bytes: int
    sessions: int
    speed: float
    threads: int


# --- client and head -------------------------------------------------------------------------------


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Client → head: which devices are there?"""


class PoolInfo(msgspec.Struct, frozen=True, tag=True):
    """Head → client: these."""

    devices: list[DeviceInfo]


class AskLease(msgspec.Struct, frozen=True, tag=True):
    """Client → head: devices for me, for as long as this connection is open."""

    devices: int | None  # None: one
    memory_bytes: int | None  # of each; None: all that is free
    sessions_in_use: list[int]  # numbers that tensors of older leases of this client still carry


class GrantedDevice(msgspec.Struct, frozen=True):
    info: DeviceInfo
    address: str  # of the device server's socket
    token: str  # shown once to the device server
    session: int


class Lease(msgspec.Struct, frozen=True, tag=True):
    """Head → client: yours."""

    lease: int
    epoch: int
    devices: list[GrantedDevice]


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """Anyone → client: no, and why."""

    reason: str


# --- head and device server ------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Device server → head: torch is loaded, sessions can start."""

    memory_bytes: int
    threads: int


class Grant(msgspec.Struct, frozen=True, tag=True):
    """Head → device server: a client with this token may have a session."""

    token: str
    session: int
    memory_bytes: int


class Revoke(msgspec.Struct, frozen=True, tag=True):
    """Head → device server: end this session if it runs, and forget its grant."""

    session: int


# --- client and device server ----------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Client → device server, with the descriptor of the client's host region."""

    versions: Versions
    token: str
    host_bytes: int
    devices: int = 1  # of the lease; where there are several, `Peers` follows the answer


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Worker → client, with the descriptors of the rings. Then the op stream begins."""

    arena_bytes: int
    worker_pid: int
    spill_bytes: int = 0  # what the session may hold beyond the device's memory


class Peer(msgspec.Struct, frozen=True):
    """A device of the lease, as its other devices see it."""

    name: str
    arena_bytes: int


class Peers(msgspec.Struct, frozen=True, tag=True):
    """Client → worker: all devices of the lease in its order, with three descriptors each (progress,
    places and arena), or two where a device has no arena to map. Then the op stream begins.
    """

    devices: list[Peer]


Message = (
    Describe
    | PoolInfo
    | AskLease
    | Lease
    | Refusal
    | Ready
    | Grant
    | Revoke
    | Hello
    | Welcome
    | Peers
)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def our_versions() -> Versions:
    """The versions of this process."""
    import torch

    import shoal
    from shoal import _core

    return Versions(shoal.__version__, str(torch.__version__), _core.PROTOCOL_VERSION)


def version_mismatch(client: Versions, server: Versions) -> str | None:
    """Why these two cannot work together, or None."""
    if client == server:
        return None
    return (
        f"versions differ: the client has shoal {client.shoal}, torch {client.torch}, protocol "
        f"{client.protocol}; the device server has shoal {server.shoal}, torch {server.torch}, "
        f"protocol {server.protocol}. Install the same versions on both sides."
    )


def encode(message: Message) -> bytes:
    """One frame."""
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


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

    def __init__(self, fds_max: int = 0) -> None:
        self.fds: list[int] = []
        self._fds_max = fds_max
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
        if length > FRAME_BYTES_MAX:
            raise ProtocolError(f"a frame of {length} bytes is over the limit of {FRAME_BYTES_MAX}")
        if len(self._bytes) < 4 + length:
            return None
        body = bytes(self._bytes[4 : 4 + length])
        del self._bytes[: 4 + length]
        try:
            return _decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"a frame is malformed: {error}") from None
