"""The node's side of shared memory: answers programs that share and open, and keeps what they share.

It lives in the agent, which knows the leases of all devices of its node. It never maps shared memory:
it keeps the descriptor to hand it out, and writes to the share's control page, which no other process
can. A participant is there as long as its *line* is: one end of a socket pair, which its worker holds.
So whatever ends a worker ends its participation in every share, at once, without a message.
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
from typing import assert_never

from shoal import _constants
from shoal.errors import ProtocolError, ShareError
from shoal.pool.base import limits, paths, process, sealed_memory
from shoal.pool.node.shares import share_directory
from shoal.pool.wire import frames, messages, node_messages, share_messages
from shoal.pool.wire.acceptor import Acceptor, PendingConnection

CONTROL_BYTES = _constants.SHARE_CONTROL_BYTES
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, which fcntl lacks

FindGrant = Callable[[str], node_messages.Grant | None]


def socket_address(device_address: str) -> str:
    """Return where the share server of a device's node listens."""
    return device_address.rpartition("/")[0] + "/shares"


def whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class ControlPage:
    """A page that every participant can map and only this process can write to."""

    def __init__(self) -> None:
        self.fd = sealed_memory.create("shoal-share-control", CONTROL_BYTES)
        self._map = mmap.mmap(self.fd, CONTROL_BYTES)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        self._words = memoryview(self._map).cast("Q")  # a word is written in one store

    def publish(self, holder: int) -> None:
        self._words[_constants.SHARE_HOLDER_WORD] = holder

    def revoke(self) -> None:
        self._words[_constants.SHARE_REVOKED_WORD] = 1

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.fd)


@dataclass
class Kept:
    """The descriptors of a share."""

    memory_fd: int
    control: ControlPage
    lines: dict[int, socket.socket] = field(default_factory=dict)  # by participant


@dataclass(eq=False)
class PendingRequest(PendingConnection):
    """A program's connection, for one request."""

    inbox: frames.Inbox = field(default_factory=lambda: frames.Inbox(fds_max=1))
    waits_for: tuple[str, int] | None = None  # share and participant


class ShareServer:
    def __init__(self, address: str, find_grant: FindGrant) -> None:
        self.directory = share_directory.ShareDirectory()
        self._find_grant = find_grant
        self._kept: dict[str, Kept] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address)
        self._listener.listen(64)
        _allow_descriptors()

    def start(self) -> None:
        """Answer from now on, in the running event loop."""
        loop = asyncio.get_running_loop()
        self._acceptor = Acceptor(
            self._listener,
            loop,
            PendingRequest,
            lambda pending: loop.add_reader(pending.socket, self._hear, pending),
            self._drop,
            most=limits.SHARE_REQUESTS_MAX,
            patience_s=limits.FIRST_FRAME_S,
        )

    def lease_ended(self, lease: int, epoch: int) -> None:
        self._do(self.directory.lease_ended(lease, epoch))

    # --- connections -------------------------------------------------------------------------------

    def _hear(self, pending: PendingRequest) -> None:
        try:
            alive = pending.inbox.read(pending.socket)
            message = pending.inbox.next(share_messages.FROM_CLIENT)
            if pending.waits_for is not None or (message is None and not alive):
                self._drop(pending)  # it has hung up, or sends more than one request
            elif message is not None:
                self._answer(pending, message)
        except (ProtocolError, ShareError) as error:
            self._reply(pending, messages.refusal(str(error)))
        except OSError:
            self._drop(pending)

    def _reply(
        self, pending: PendingRequest, message: share_messages.FromAgent, fds: tuple[int, ...] = ()
    ) -> None:
        with suppress(OSError):
            frames.send(pending.socket, message, fds)
        self._drop(pending)

    def _drop(self, pending: PendingRequest) -> None:
        pending.inbox.close_fds()
        self._acceptor.drop(pending)
        waited, pending.waits_for = pending.waits_for, None
        if waited is not None:
            self.directory.give_up(*waited)

    # --- requests ----------------------------------------------------------------------------------

    def _answer(self, pending: PendingRequest, message: share_messages.FromClient) -> None:
        match message:
            case share_messages.ShareCreate():
                self._create(pending, message)
            case share_messages.ShareOpen():
                self._open(pending, message)
            case share_messages.ShareAcquire(share_id, key):
                self._acquire(pending, share_id, key)
            case share_messages.ShareRelease(share_id, key):
                self._do(self.directory.release(share_id, key))
                self._reply(pending, messages.Done())
            case share_messages.ShareEnd(share_id, key):
                self._do(self.directory.end(share_id, key))
                self._reply(pending, messages.Done())
            case share_messages.ShareList(token):
                client = self._party(pending, token).client
                found = self.directory.of(client)[: limits.SHARES_LISTED_MAX]
                self._reply(pending, share_messages.ShareListing(found))
            case _:
                assert_never(message)

    def _party(self, pending: PendingRequest, token: str) -> share_directory.Party:
        grant = self._find_grant(token)
        if grant is None:
            raise ShareError(
                "this program does not have a lease on this node. Type: shoal.connect()"
            )
        pid, _ = process.peer_credentials(pending.socket)
        return share_directory.Party(grant.client, grant.lease, grant.epoch, pid)

    def _create(self, pending: PendingRequest, request: share_messages.ShareCreate) -> None:
        party = self._party(pending, request.token)
        grant = self._find_grant(request.token)
        assert grant is not None
        if len(pending.inbox.fds) != 1:
            raise ProtocolError("ShareCreate comes with one descriptor")
        check_memory(pending.inbox.fds[0], request.bytes, grant.memory_bytes)
        share_id, secret, key = secrets.token_hex(8), secrets.token_hex(24), secrets.token_hex(24)
        control = ControlPage()
        try:
            share = self.directory.create(share_id, secret, key, party, request)
        except ShareError:
            control.close()
            raise
        self._kept[share_id] = Kept(pending.inbox.fds.pop(), control)
        self._do([share_directory.Publish(share_id, share.holder)])
        with self._draw_line(share_id, share_directory.OWNER) as line:
            made = share_messages.ShareMade(share_id, secret, share_directory.OWNER, key)
            self._reply(pending, made, (control.fd, line.fileno()))

    def _open(self, pending: PendingRequest, request: share_messages.ShareOpen) -> None:
        party = self._party(pending, request.token)
        key = secrets.token_hex(24)
        share, participant = self.directory.open(request.share, request.secret, key, party)
        kept = self._kept[share.id]
        with self._draw_line(share.id, participant.number) as line:
            opened = share_messages.ShareOpened(
                share.bytes, share.mode, share.layout, participant.number, key
            )
            self._reply(pending, opened, (kept.memory_fd, kept.control.fd, line.fileno()))

    def _acquire(self, pending: PendingRequest, share_id: str, key: str) -> None:
        number, steps = self.directory.acquire(share_id, key)
        pending.waits_for = share_id, number
        self._acceptor.stop_timer(pending)  # from now on the program decides how long it waits
        self._do(steps)

    def _draw_line(self, share_id: str, number: int) -> socket.socket:
        """Return the end for the participant's worker; when its last copy closes, it has left."""
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            self._do(self.directory.left(share_id, number))
            raise ShareError(
                "the node does not have a descriptor left. Share fewer tensors."
            ) from None
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
                    self._notify((share_id, number), messages.Done())
                case share_directory.Forget(_, number):
                    self._hang_up(kept, number)
                case share_directory.Revoke(share_id, waiting):
                    kept.control.revoke()
                    for number in waiting:
                        refusal = messages.refusal(str(share_directory.unknown()))
                        self._notify((share_id, number), refusal)
                    self._let_go(share_id)

    def _notify(self, who: tuple[str, int], message: messages.Done | messages.Refusal) -> None:
        for pending in list(self._acceptor.pending):
            if pending.waits_for == who:
                pending.waits_for = None
                self._reply(pending, message)

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
    """Raise the limit of descriptors: each share and each participant takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = (
        limits.DESCRIPTORS_MAX
        if hard == resource.RLIM_INFINITY
        else min(hard, limits.DESCRIPTORS_MAX)
    )
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def check_memory(fd: int, size: int, size_max: int) -> None:
    """Raise unless the descriptor is sealed memory of that size."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise ProtocolError("the shared descriptor is not memory") from None
    if seals & sealed_memory.FIXED_SIZE != sealed_memory.FIXED_SIZE:
        raise ProtocolError("the shared memory is not sealed: it could be cut short")
    if not 0 < size <= size_max or os.fstat(fd).st_size != whole_pages(size):
        raise ShareError(
            f"{size} bytes cannot be shared from a lease that booked {size_max} bytes: shared tensors "
            "stay in the device's memory. Book more with memory=, or share a part"
        )


def make_memory(size: int) -> int:
    """Return new memory for `size` bytes."""
    return sealed_memory.create("shoal-share", whole_pages(size))


def address_of(pool_id: str, node: str) -> str:
    """Return where the share server of a node listens."""
    return socket_address(paths.socket_name(pool_id, f"{node}/device" if node else "device"))
