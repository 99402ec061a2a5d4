"""Leases of this program: joining a pool, starting one where there is none, and giving it back."""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import socket
import struct
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec
import torch

from shoal import _core
from shoal.device import network
from shoal.errors import LeaseError, ProtocolError
from shoal.pool import client, frames, home, local, messages
from shoal.pool.fields import SessionPart
from shoal.pool.keeper import Keeper
from shoal.pool.spec import parse_memory

_log = logging.getLogger("shoal")

_lock = threading.RLock()
_lease: Lease | None = None
_embedded: local.Pool | None = None
_forked = False  # this process is a fork of one that held a lease
HELLO_TIMEOUT_S = 30.0
_HEARTBEAT, _HEARTBEAT_AT = struct.Struct("=Q"), 64  # in csrc/transport/progress.h
Transport = Literal["auto", "network"]


class Lease:
    """This program's right to devices, from `connect()` until `close()` or the program's end.

    >>> with shoal.connect(devices=2) as lease:
    ...     print(lease.devices)
    """

    def __init__(
        self,
        head: client.Connection,
        granted: messages.Lease,
        opened: list[_Opened],
        sockets: list[socket.socket],
    ) -> None:
        self.url = head.url
        self.worker_pids = [one.welcome.worker_pid for one in opened]  # by device; on its machine
        self.by_network = [one.elsewhere is not None for one in opened]  # by device
        self.attached = [one.elsewhere for one in opened]  # by device; None: on this machine
        self.number = granted.lease
        self.epoch = granted.epoch
        self.granted = granted.devices
        self.end_reason: str | None = None  # why the pool took devices back, if it did
        self._head = head
        self._sockets = sockets
        self._counting = threading.Lock()  # held while counters of the devices are read
        self._progress = [one.progress for one in opened]
        self._closing = False
        self._keeper: Keeper | None = None
        if granted.secret:  # a standing pool: the lease outlives this connection, and even the head
            self._keeper = Keeper(head, granted, self._on_lost, self._uses)

    @property
    def devices(self) -> list[torch.device]:
        """The member devices, for those who place by hand: `torch.device("shoal")` is all of them."""
        return [torch.device("shoal", i + 1) for i in range(len(self.granted))]

    @property
    def active(self) -> bool:
        return _lease is self

    def heartbeat(self, device: int) -> int | None:
        """A number that the worker of a device (0 is the first) counts up five times a second, also
        during a long call; None once the lease is closed. Nobody is asked: it is read from memory."""
        with self._counting:
            progress = self._progress[device]
            if self._closing or progress is None:
                return None
            return int(_HEARTBEAT.unpack_from(progress, _HEARTBEAT_AT)[0])

    def give_up(self, device: int) -> None:
        """The worker of a device (0 is the first) is known not to go on: others on this machine stop
        waiting for what it was to compute, and say so. If its heart beats again this is void."""
        with self._counting:
            if not self._closing:
                _core.give_up(device + 1)

    def close(self) -> None:
        """Gives the devices back. Tensors on them are gone."""
        global _lease
        with _lock:
            if _lease is not self:
                return
            _lease = None
            with self._counting:
                self._closing = True
                self._forget_progress()
            _core.detach()
            self._let_go()

    def _let_go(self) -> None:
        """The lease ends when its connection to the head does, or when its keeper says so."""
        if self._keeper is None:
            self._head.close()
        else:
            self._keeper.stop()
        for copy in self._sockets:  # even if the head is away, the workers know that it is over
            with suppress(OSError):
                copy.shutdown(socket.SHUT_RDWR)
            copy.close()

    def _forget_progress(self) -> None:
        for progress in self._progress:
            if progress is not None:
                progress.close()

    def _abandon(self) -> None:
        """In a forked child: the parent's lease goes on."""
        self._forget_progress()
        if self._keeper is None:
            os.close(self._head.socket.detach())
        else:
            self._keeper.abandon()
        for copy in self._sockets:
            copy.close()

    def _on_lost(self, parts: list[SessionPart], reason: str) -> None:
        """Runs in the keeper's thread: whoever waits for these devices gets DeviceLostError now."""
        if self._closing:
            return
        self.end_reason = reason
        for device, copy in zip(self.granted, self._sockets, strict=True):
            if device.part in parts:
                _log.warning("shoal: device %s of this lease is lost: %s", device.info.name, reason)
                with suppress(OSError):  # it may be gone already
                    copy.shutdown(socket.SHUT_RDWR)

    def _uses(self) -> list[messages.SessionUse]:
        """What the session has done so far on each device."""
        found = []
        with self._counting:
            for index, device in enumerate(() if self._closing else self.granted, 1):
                traffic, memory = _core.traffic(index), _core.memory_use(index)
                found.append(
                    messages.SessionUse(
                        *device.part, memory["allocated_bytes"], traffic["messages"],
                        traffic["bytes_in"], traffic["bytes_out"],
                    )
                )  # fmt: skip
        return found

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(d.info.name for d in self.granted)
        return f"<shoal.Lease {self.url} [{names}] {'active' if self.active else 'ended'}>"


def connect(
    url: str | None = None,
    *,
    devices: int | None = None,
    memory: int | float | str | None = None,
    kind: str | None = None,
    duration_s: float | None = None,
    transport: Transport = "auto",
) -> Lease:
    """Leases devices of a pool; an earlier lease of this program ends.

    Args:
        url: the pool. Default: $SHOAL_POOL, else the pool that was joined (`shoal join`), else one
            that this program starts on its machine.
        devices: how many. Default: one.
        memory: of each device: in bytes, like "8GiB", or a part of it like "50%" or 0.5. Default: all
            that is free.
        kind: of the devices, like "a100" or "a100|v100".
        duration_s: how long, in seconds. Default: until it is given back.
        transport: "auto" shares memory with devices on this machine and reaches others by network;
            "network" reaches all of them by network, to try or to measure what others get.

    >>> lease = shoal.connect(devices=1, memory="1GiB")
    """
    global _lease, _embedded
    memory_bytes, fraction = parse_memory(memory)
    if transport not in get_args(Transport):
        raise ValueError(f"transport is one of {', '.join(get_args(Transport))}, not {transport!r}")
    with _lock:
        _refuse_in_fork()
        if _lease is not None:
            _lease.close()
        prepare()
        url = url or client.default_url()
        if url is None:
            if _embedded is None or not _embedded.running:
                _embedded = local.up()
            url = _embedded.url
        request = messages.AskLease(
            devices, memory_bytes, _core.sessions_in_use(), fraction, kind, duration_s, _program()
        )
        head, granted = local.ask(url, request)
        if not isinstance(granted, messages.Lease):
            raise LeaseError(f"the pool answered {type(granted).__name__}")
        try:
            opened, sockets = _open(head, granted, transport)
        except BaseException:
            with suppress(LeaseError):
                if granted.secret:  # closing would not end it: a client may come back
                    head.ask(messages.Release(), HELLO_TIMEOUT_S)
            head.close()
            raise
        _lease = Lease(head, granted, opened, sockets)
        return _lease


def _program() -> str:
    """What to call this program where people look at the pool."""
    return f"{os.path.basename(sys.argv[0] or 'python')} (pid {os.getpid()})"[:200]


@dataclass
class _Opened:
    """A worker that has said Welcome."""

    device: messages.GrantedDevice
    connection: socket.socket
    welcome: messages.Welcome
    fds: list[int]  # requests, replies, progress, places and, where it can be mapped, arena
    elsewhere: network.Attached | None = None  # on another machine: nothing is mapped
    link: _core.Link | None = None
    progress: mmap.mmap | None = None  # the page in which the worker says how far it is


def _open(
    head: client.Connection, granted: messages.Lease, transport: Transport
) -> tuple[list[_Opened], list[socket.socket]]:
    """Connects to the device servers and hands the session to the core.

    Returns what it opened and, for a standing pool, second descriptors of the connections, which can
    shut them down.
    """
    opened: list[_Opened] = []
    try:
        for device in granted.devices:
            opened.append(_open_device(device, head, granted, transport))
        if len(opened) > 1:
            _introduce(opened, head)
        for one in opened:
            if one.elsewhere is not None:
                one.link = one.elsewhere.open_link()
                one.fds = one.link.fds()
                # From here on only its end matters: nothing more is said on it.
                one.connection = socket.socket(fileno=one.connection.detach())
    except BaseException:
        for one in opened:
            one.connection.close()
            for fd in one.fds:
                os.close(fd)
        raise
    members = []
    copies = []
    for one in opened:
        one.connection.settimeout(None)
        if granted.secret:
            copies.append(one.connection.dup())
        one.progress = mmap.mmap(one.fds[2], mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ)
        members.append(
            _core.Member(
                socket=one.connection.detach(),
                fds=one.fds,
                arena_bytes=one.welcome.arena_bytes,
                memory_bytes=one.device.info.memory_bytes,
                spill_bytes=one.welcome.spill_bytes,
                name=one.device.info.name,
                is_cpu=one.device.info.device == "cpu",
                link=one.link,
            )
        )
    _core.attach(granted.devices[0].session, members)
    return opened, copies


def _open_device(
    device: messages.GrantedDevice,
    head: client.Connection,
    lease: messages.Lease,
    transport: Transport,
) -> _Opened:
    connection = _reach(device) if transport == "auto" else None
    if connection is None:
        elsewhere = network.attach(device, head, lease)
        return _Opened(device, elsewhere.connection, elsewhere.welcome, [], elsewhere)
    host_fd, host_bytes = _core.host_region()
    fds: list[int] = []
    devices = len(lease.devices)
    try:
        hello = messages.Hello(messages.our_versions(), device.token, host_bytes, devices)
        frames.send(connection, hello, [host_fd])
        welcome, fds = frames.receive(connection, fds_max=5)
        if isinstance(welcome, messages.Refusal):
            raise LeaseError(welcome.reason)
        if not isinstance(welcome, messages.Welcome) or len(fds) < 4:
            raise LeaseError(f"device {device.info.name} answered {type(welcome).__name__}")
    except (OSError, ProtocolError) as error:
        connection.close()
        raise LeaseError(f"device {device.info.name} cannot be reached: {error}") from None
    except LeaseError:
        connection.close()
        for fd in fds:
            os.close(fd)
        raise
    return _Opened(device, connection, welcome, fds)


def _introduce(opened: list[_Opened], head: client.Connection) -> None:
    """Tells each worker of the others, so that they copy from one another."""
    for own, one in enumerate(opened):
        peers = []
        fds: list[int] = []
        for other in opened:
            elsewhere = None
            if other is not one and (one.elsewhere or other.elsewhere):
                elsewhere = _endpoint(other, one, head)
            elif other is not one:
                fds += other.fds[2:]
            peers.append(
                messages.Peer(other.device.info.name, other.welcome.arena_bytes, elsewhere)
            )
        try:
            frames.send(one.connection, messages.Peers(peers, own), fds)
        except OSError as error:
            raise LeaseError(f"device {one.device.info.name} was lost: {error}") from None


def _endpoint(device: _Opened, reader: _Opened, head: client.Connection) -> messages.PeerEndpoint:
    """Where `reader`, on another machine than `device`, reaches it."""
    endpoint, welcome = device.device.network, device.welcome
    if endpoint is None or not welcome.data_id:
        raise LeaseError(
            f"device {device.device.info.name} cannot be reached from {reader.device.info.name}: its "
            "pool does not listen. Start it with: shoal up --listen ADDRESS"
        )
    host = endpoint.host or head.host
    if device.elsewhere is None and reader.elsewhere is not None:
        # The device is on our machine, which the reader knows by the address that we came from.
        host = str(reader.elsewhere.connection.getsockname()[0])
    return messages.PeerEndpoint(
        msgspec.structs.replace(endpoint, host=host), welcome.data_id, welcome.secret
    )


def _reach(device: messages.GrantedDevice) -> socket.socket | None:
    """A connection to the device server if it is on this machine and can share memory with us."""
    if device.machine not in ("", home.machine_id()):
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(HELLO_TIMEOUT_S)
    try:
        connection.connect(device.address)
        return connection
    except OSError as error:  # the same machine, but another network namespace or container
        connection.close()
        if device.network is None:
            raise LeaseError(f"device {device.info.name} cannot be reached: {error}") from None
        return None


def prepare() -> None:
    """Registers the kernels; the first use of the device does this."""
    _core.register_kernels()


def ensure() -> None:
    """A lease for a program that did not ask for one."""
    with _lock:
        _refuse_in_fork()
        if _lease is None:
            connect()


def current() -> Lease | None:
    """This program's lease, if it has one."""
    return _lease


def device_info() -> list[messages.DeviceInfo]:
    """What the leased devices are.

    >>> for device in shoal.device_info():
    ...     print(device.name, device.memory_bytes)
    """
    ensure()
    lease = _lease
    return [d.info for d in lease.granted] if lease is not None else []


def whole(devices: list[messages.DeviceInfo]) -> messages.DeviceInfo:
    """The lease as one device."""
    first = devices[0]
    return msgspec.structs.replace(
        first,
        name="+".join(d.name for d in devices),
        memory_bytes=sum(d.memory_bytes for d in devices),
        free_bytes=sum(d.free_bytes for d in devices),
        speed=sum(d.speed for d in devices),
        threads=sum(d.threads for d in devices),
    )


def in_bad_fork() -> bool:
    """Whether this process was forked from one that uses the device: it cannot use it as well."""
    return _forked


def _refuse_in_fork() -> None:
    if _forked:
        raise LeaseError(
            "shoal cannot be used in a process that was forked from one that uses it; start it with "
            "torch.multiprocessing.set_start_method('spawn'), or keep shoal tensors out of it"
        )


def _after_fork() -> None:
    """The child must neither talk on the parent's streams nor keep them open."""
    global _forked, _lease, _embedded, _lock
    _lock = threading.RLock()  # another thread of the parent may have held it
    _forked = _core.abandon() or _forked
    if _lease is not None:
        _lease._abandon()
    _lease = None
    _embedded = None


def _at_exit() -> None:
    if _lease is not None and not _forked:
        _lease.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
