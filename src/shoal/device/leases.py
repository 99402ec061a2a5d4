"""Leases of this program: joining a pool, starting one where there is none, and giving it back."""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec
import torch

from shoal import _core, integrations
from shoal.device import by_name, guest, network
from shoal.errors import LeaseError, ProtocolError
from shoal.pool.base import paths
from shoal.pool.client import head_connection
from shoal.pool.client.lease_keepalive import Keeper
from shoal.pool.local import local_pool
from shoal.pool.node.spec import parse_memory
from shoal.pool.wire import frames, messages
from shoal.pool.wire.end_reasons import End, Why
from shoal.pool.wire.message_fields import SessionPart
from shoal_autoload import asked, declined

_log = logging.getLogger("shoal")

_lock = threading.RLock()
_lease: Lease | None = None
_embedded: local_pool.Pool | None = None
_forked = False  # this process is a fork of one that held a lease
HELLO_TIMEOUT_S = 30.0
Transport = Literal["auto", "network"]
# By what the core saw of a device that it lost: the reason, and how many seconds to wait for the head,
# which knows more. The client notices a silent network after 4 s and reports it within 5.
_SEEN = {
    _core.SEEN_CLOSED: (Why.UNKNOWN, 1.0),
    _core.SEEN_SILENT: (Why.CUT, 0.8),
    _core.SEEN_HUNG: (Why.WORKER_HUNG, 0.0),
    _core.SEEN_BROKEN: (Why.WORKER_FAILED, 1.0),
}


class Lease:
    """This program's right to devices, from `connect()` until `close()` or the program's end.

    >>> with shoal.connect(devices=2) as lease:
    ...     print(lease.devices)
    """

    def __init__(
        self,
        head: head_connection.Connection,
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
        self.end: End | None = None  # why the pool took devices back, if it did
        self._session = granted.devices[0].session
        self._ends: dict[SessionPart, End] = {}  # of the devices that are lost
        self._guessed: set[SessionPart] = set()  # of them, those that the head has not explained
        self._told = threading.Condition()  # that there are more of them
        self._asking = threading.Lock()  # held by the thread that listens to the head
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

    @property
    def end_reason(self) -> str | None:
        """Why the pool took devices back, if it did."""
        return self.end.text if self.end is not None else None

    def heartbeat(self, device: int) -> int | None:
        """A number that the worker of a device (0 is the first) counts up five times a second, also
        during a long call; None once the lease is closed. Nobody is asked: it is read from memory."""
        with self._counting:
            progress = self._progress[device]
            if self._closing or progress is None:
                return None
            return _core.heartbeat(progress)

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
            self._give_back()
            _core.detach()

    def _give_back(self) -> None:
        """Tell the head first: else it would hear of a worker that lost its client."""
        if self._keeper is None:
            with suppress(ProtocolError):
                self._head.send(messages.Release())
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

    def _on_lost(self, parts: list[SessionPart], end: End, guessed: bool = False) -> None:
        """Devices of the lease are lost: whoever waits for them gets DeviceLostError now."""
        if self._closing:
            return
        with self._told:
            new = [p for p in parts if p not in self._ends or p in self._guessed]
        for member, device in enumerate(self.granted):
            if device.part in new:
                if not guessed:
                    _core.tell_lost(self._session, member, end.text)
                name = device.info.name
                _log.warning("shoal: device %s of this lease is lost: %s", name, end.text)
                if self._sockets:
                    with suppress(OSError):  # it may be gone already
                        self._sockets[member].shutdown(socket.SHUT_RDWR)
        with self._told:  # whoever learns the reason finds the devices lost
            if new and (self.end is None or self.end in map(self._ends.get, self._guessed)):
                self.end = end
            self._ends.update((p, end) for p in new)
            self._guessed = self._guessed | set(new) if guessed else self._guessed - set(new)
            self._told.notify_all()

    def _explain(self, member: int, seen: int, reason: str) -> str:
        """Return why a device is lost. The core calls this for an error that is about to be raised."""
        if self._closing:
            return End(Why.GIVEN_BACK).text
        why, wait_s = _SEEN[seen]
        own = End(why, reason if why is Why.WORKER_FAILED else "")
        part = self.granted[member].part
        if part not in self._ends:
            self._await_end(part, why, wait_s)
        if part not in self._ends:
            self._on_lost([part], own, guessed=True)
        return self._ends[part].text if part in self._ends else own.text

    def _await_end(self, part: SessionPart, seen: Why, wait_s: float) -> None:
        """Wait a moment for the head to say why a part is lost."""
        deadline = time.monotonic() + wait_s
        if self._keeper is not None:
            if self._keeper.ask(part, seen):
                with self._told:
                    self._told.wait_for(lambda: part in self._ends or self._closing, wait_s)
            return
        with self._asking:  # an embedded pool: nobody else listens to the head
            try:
                if part not in self._ends:
                    self._head.send(messages.LostSight([part], seen))
                while part not in self._ends:
                    message = self._head.receive(max(0.0, deadline - time.monotonic()))
                    if isinstance(message, messages.SessionsLost):
                        self._on_lost(message.parts, message.end)
            except head_connection.Silence:
                return
            except ProtocolError:
                self._on_lost([device.part for device in self.granted], End(Why.HEAD_ENDED))

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
        url = url or head_connection.default_url()
        if url is None:
            if _embedded is None or not _embedded.running:
                _embedded = local_pool.up()
            url = _embedded.url
        request = messages.AskLease(
            devices, memory_bytes, _core.sessions_in_use(), fraction, kind, duration_s, _program()
        )
        head, granted = local_pool.ask(url, request)
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
        guest.show()
        by_name.adopt()
        if not declined():
            integrations.install()  # what a library does with a model on the device
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
    head: head_connection.Connection, granted: messages.Lease, transport: Transport
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
    head: head_connection.Connection,
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


def _introduce(opened: list[_Opened], head: head_connection.Connection) -> None:
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


def _endpoint(
    device: _Opened, reader: _Opened, head: head_connection.Connection
) -> messages.PeerEndpoint:
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
    if device.machine not in ("", paths.machine_id()):
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


_ASKED_HELP = "To keep programs from choosing shoal by themselves: export SHOAL_DEFAULT=0"


def ensure() -> None:
    """A lease for a program that did not ask for one."""
    with _lock:
        _refuse_in_fork()
        if _lease is None:
            try:
                connect()
            except LeaseError as error:
                raise LeaseError(f"{error}\n{_ASKED_HELP}" if asked() else str(error)) from None


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


def _explain_loss(session: int, member: int, seen: int, reason: str) -> str:
    lease = _lease
    if lease is None or lease._session != session or _forked:
        return reason
    return lease._explain(member, seen, reason)


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


_core.set_loss_explainer(_explain_loss)
os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
