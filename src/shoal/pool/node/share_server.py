"""The node's end of shared memory: answers programs that share and open, and keeps what they share.

It lives in the agent, which knows the leases of all devices of its node. It never maps a shared memory:
it keeps its descriptor to hand it out, and writes to the share's control page, which nobody else can.
A participant is there as long as its *line* is: one end of a socket pair, which its worker holds. So
whatever ends a worker ends its part in every share, at once, without a message.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import resource
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from shoal.errors import ProtocolError, ShareError
from shoal.pool.base import limits, paths, process
from shoal.pool.node import share_directory
from shoal.pool.wire import frames, messages, node_messages, share_messages

CONTROL_BYTES = mmap.PAGESIZE
_SEAL, _SHRINK, _GROW, _FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10  # of fcntl's F_SEAL_…
_REVOKED, _HOLDER = (
    0,
    1,
)  # words of the control page: ShareControl in csrc/worker/shared/shared_block.h
_DESCRIPTORS = 65536  # as many as the system allows, up to this

FindGrant = Callable[[str], node_messages.Grant | None]


def socket_address(device_address: str) -> str:
    """Where the share server of a device's node listens."""
    return device_address.rpartition("/")[0] + "/shares"


def whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class ControlPage:
    """A page that everybody can map and only this process can write to."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("shoal-share-control", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, CONTROL_BYTES)
        self._map = mmap.mmap(self.fd, CONTROL_BYTES)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SHRINK | _GROW | _FUTURE_WRITE | _SEAL)
        self._words = memoryview(self._map).cast("Q")  # a word is written in one store

    def publish(self, holder: int) -> None:
        self._words[_HOLDER] = holder

    def revoke(self) -> None:
        self._words[_REVOKED] = 1

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.fd)


@dataclass
class Kept:
    """What a share is made of."""

    memory_fd: int
    control: ControlPage
    lines: dict[int, socket.socket] = field(default_factory=dict)  # by participant


@dataclass
class Visitor:
    """A program that asks for something; one request for each connection."""

    inbox: frames.Inbox
    late: asyncio.TimerHandle
    waits_for: tuple[str, int] | None = None  # share and participant


class ShareServer:
    def __init__(self, address: str, find_grant: FindGrant) -> None:
        self.directory = share_directory.ShareDirectory()
        self._find_grant = find_grant
        self._kept: dict[str, Kept] = {}
        self._visitors: dict[socket.socket, Visitor] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address)
        self._listener.listen(64)
        self._listener.setblocking(False)
        _allow_descriptors()

    def start(self) -> None:
        """Answers from now on, in the running event loop."""
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def lease_ended(self, lease: int, epoch: int) -> None:
        self._do(self.directory.lease_ended(lease, epoch))

    # --- visitors ----------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._visitors) >= limits.SHARE_VISITORS_MAX:
            connection.close()
            return
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        late = loop.call_later(limits.FIRST_FRAME_S, self._dismiss, connection)
        self._visitors[connection] = Visitor(frames.Inbox(fds_max=1), late)
        loop.add_reader(connection, self._hear, connection)

    def _hear(self, connection: socket.socket) -> None:
        visitor = self._visitors[connection]
        try:
            process.check_same_user(connection)
            alive = visitor.inbox.read(connection)
            message = visitor.inbox.next()
            if visitor.waits_for is not None or (message is None and not alive):
                self._dismiss(connection)  # it has hung up, or has more to say than it may
            elif message is not None:
                self._answer(connection, visitor, message)
        except (ProtocolError, ShareError) as error:
            self._reply(connection, messages.refusal(str(error)))
        except OSError:
            self._dismiss(connection)

    def _reply(
        self, connection: socket.socket, message: messages.Message, fds: tuple[int, ...] = ()
    ) -> None:
        with suppress(OSError):
            frames.send(connection, message, fds)
        self._dismiss(connection)

    def _dismiss(self, connection: socket.socket) -> None:
        visitor = self._visitors.pop(connection, None)
        if visitor is None:
            return
        visitor.late.cancel()
        visitor.inbox.close_fds()
        asyncio.get_running_loop().remove_reader(connection)
        connection.close()
        if visitor.waits_for is not None:
            self.directory.give_up(*visitor.waits_for)

    # --- requests ----------------------------------------------------------------------------------

    def _answer(
        self, connection: socket.socket, visitor: Visitor, message: messages.Message
    ) -> None:
        match message:
            case share_messages.ShareCreate():
                self._create(connection, visitor, message)
            case share_messages.ShareOpen():
                self._open(connection, message)
            case share_messages.ShareAcquire(share_id, key):
                self._acquire(connection, visitor, share_id, key)
            case share_messages.ShareRelease(share_id, key):
                self._do(self.directory.release(share_id, key))
                self._reply(connection, messages.Done())
            case share_messages.ShareEnd(share_id, key):
                self._do(self.directory.end(share_id, key))
                self._reply(connection, messages.Done())
            case share_messages.ShareList(token):
                client = self._party(connection, token).client
                found = self.directory.of(client)[: limits.SHARES_LISTED_MAX]
                self._reply(connection, share_messages.ShareListing(found))
            case _:
                raise ProtocolError(f"nobody shares memory with {type(message).__name__}")

    def _party(self, connection: socket.socket, token: str) -> share_directory.Party:
        grant = self._find_grant(token)
        if grant is None:
            raise ShareError(
                "this program has no lease on this node (any more). Type: shoal.connect()"
            )
        pid, _ = process.peer_credentials(connection)
        return share_directory.Party(grant.client, grant.lease, grant.epoch, pid)

    def _create(
        self, connection: socket.socket, visitor: Visitor, request: share_messages.ShareCreate
    ) -> None:
        party = self._party(connection, request.token)
        grant = self._find_grant(request.token)
        assert grant is not None
        if len(visitor.inbox.fds) != 1:
            raise ProtocolError("a shared memory comes with its descriptor")
        check_memory(visitor.inbox.fds[0], request.bytes, grant.memory_bytes)
        share_id, secret, key = secrets.token_hex(8), secrets.token_hex(24), secrets.token_hex(24)
        control = ControlPage()
        try:
            share = self.directory.create(share_id, secret, key, party, request)
        except ShareError:
            control.close()
            raise
        self._kept[share_id] = Kept(visitor.inbox.fds.pop(), control)
        self._do([share_directory.Publish(share_id, share.holder)])
        with self._draw_line(share_id, share_directory.OWNER) as line:
            made = share_messages.ShareMade(share_id, secret, share_directory.OWNER, key)
            self._reply(connection, made, (control.fd, line.fileno()))

    def _open(self, connection: socket.socket, request: share_messages.ShareOpen) -> None:
        party = self._party(connection, request.token)
        key = secrets.token_hex(24)
        share, participant = self.directory.open(request.share, request.secret, key, party)
        kept = self._kept[share.id]
        with self._draw_line(share.id, participant.number) as line:
            opened = share_messages.ShareOpened(
                share.bytes, share.mode, share.layout, participant.number, key
            )
            self._reply(connection, opened, (kept.memory_fd, kept.control.fd, line.fileno()))

    def _acquire(
        self, connection: socket.socket, visitor: Visitor, share_id: str, key: str
    ) -> None:
        number, steps = self.directory.acquire(share_id, key)
        visitor.waits_for = share_id, number
        visitor.late.cancel()  # from now on the program says how long it waits
        self._do(steps)

    def _draw_line(self, share_id: str, number: int) -> socket.socket:
        """The end that goes to the participant's worker; when its last copy closes, it has left."""
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            self._do(self.directory.left(share_id, number))
            raise ShareError("the node has no descriptors left: share fewer tensors") from None
        self._kept[share_id].lines[number] = ours
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours, self._line_closed, share_id, number)
        return theirs

    def _line_closed(self, share_id: str, number: int) -> None:
        self._do(self.directory.left(share_id, number))

    # --- instructions ------------------------------------------------------------------------------

    def _do(self, steps: list[share_directory.Instruction]) -> None:
        for step in steps:
            kept = self._kept[step.share]
            match step:
                case share_directory.Publish(_, holder):
                    kept.control.publish(holder)
                case share_directory.Granted(share_id, number):
                    self._tell((share_id, number), messages.Done())
                case share_directory.Forget(_, number):
                    self._hang_up(kept, number)
                case share_directory.Revoke(share_id, waiting):
                    kept.control.revoke()
                    for number in waiting:
                        self._tell(
                            (share_id, number), messages.refusal(str(share_directory.unknown()))
                        )
                    self._let_go(share_id)

    def _tell(self, who: tuple[str, int], message: messages.Message) -> None:
        for connection, visitor in list(self._visitors.items()):
            if visitor.waits_for == who:
                visitor.waits_for = None
                self._reply(connection, message)

    def _hang_up(self, kept: Kept, number: int) -> None:
        line = kept.lines.pop(number, None)
        if line is not None:
            asyncio.get_running_loop().remove_reader(line)
            line.close()

    def _let_go(self, share_id: str) -> None:
        kept = self._kept.pop(share_id)
        for number in list(kept.lines):
            self._hang_up(kept, number)
        kept.control.close()
        os.close(kept.memory_fd)


def _allow_descriptors() -> None:
    """Each share and each participant is a descriptor: more than a program usually may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def check_memory(fd: int, size: int, size_max: int) -> None:
    """Refuses a descriptor that is no sealed memory of that size."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise ProtocolError("what is to be shared is no memory") from None
    if seals & (_SHRINK | _GROW) != _SHRINK | _GROW:
        raise ProtocolError("what is to be shared could be cut short: it is not sealed")
    if not 0 < size <= size_max or os.fstat(fd).st_size != whole_pages(size):
        raise ShareError(
            f"{size} bytes cannot be shared from a device of {size_max} bytes: shared tensors stay in "
            "the device's memory. Lease more of it, or share a part"
        )


def make_memory(size: int) -> int:
    """A new memory for `size` bytes that nobody can cut short."""
    fd = os.memfd_create("shoal-share", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, whole_pages(size))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SHRINK | _GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def address_of(pool_id: str, node: str) -> str:
    """Where the share server of a node listens."""
    return socket_address(paths.socket_name(pool_id, f"{node}/device" if node else "device"))
