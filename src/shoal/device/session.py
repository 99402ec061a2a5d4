"""Leases of this program: joining a pool, starting one where there is none, and giving it back."""

from __future__ import annotations

import atexit
import os
import socket
import threading
from dataclasses import dataclass
from types import TracebackType

import msgspec
import torch

from shoal import _core
from shoal.errors import LeaseError, ProtocolError
from shoal.pool import local, messages
from shoal.pool.spec import parse_bytes

_lock = threading.RLock()
_lease: Lease | None = None
_embedded: local.Pool | None = None
_forked = False  # this process is a fork of one that held a lease
HELLO_TIMEOUT_S = 30.0


class Lease:
    """This program's right to devices, from `connect()` until `close()` or the program's end.

    >>> with shoal.connect(devices=2) as lease:
    ...     print(lease.devices)
    """

    def __init__(
        self, url: str, granted: messages.Lease, head: socket.socket, worker_pids: list[int]
    ) -> None:
        self.url = url
        self.worker_pids = worker_pids  # by device; on this machine
        self.epoch = granted.epoch
        self.granted = granted.devices
        self._head = head  # the lease ends when this connection does

    @property
    def devices(self) -> list[torch.device]:
        """The member devices, for those who place by hand: `torch.device("shoal")` is all of them."""
        return [torch.device("shoal", i + 1) for i in range(len(self.granted))]

    @property
    def active(self) -> bool:
        return _lease is self

    def close(self) -> None:
        """Gives the devices back. Tensors on them are gone."""
        global _lease
        with _lock:
            if _lease is not self:
                return
            _lease = None
            _core.detach()
            self._head.close()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(d.info.name for d in self.granted)
        return f"<shoal.Lease {self.url} [{names}] {'active' if self.active else 'ended'}>"


def connect(
    url: str | None = None, *, devices: int | None = None, memory: int | str | None = None
) -> Lease:
    """Leases devices of a pool; an earlier lease of this program ends.

    Args:
        url: the pool. Default: $SHOAL_POOL, else a pool that this program starts on its machine.
        devices: how many. Default: one.
        memory: of each device, in bytes or like "8GiB". Default: all that is free.

    >>> lease = shoal.connect(devices=1, memory="1GiB")
    """
    global _lease, _embedded
    memory_bytes = parse_bytes(memory) if isinstance(memory, str) else memory
    with _lock:
        _refuse_in_fork()
        if _lease is not None:
            _lease.close()
        prepare()
        url = url or os.environ.get("SHOAL_POOL") or None
        if url is None:
            if _embedded is None or not _embedded.running:
                _embedded = local.up()
            url = _embedded.url
        request = messages.AskLease(devices, memory_bytes, _core.sessions_in_use())
        head, granted = local.ask(url, request)
        if not isinstance(granted, messages.Lease):
            raise LeaseError(f"the pool answered {type(granted).__name__}")
        try:
            pids = _open(granted)
        except BaseException:
            head.close()
            raise
        _lease = Lease(url, granted, head, pids)
        return _lease


@dataclass
class _Opened:
    """A worker that has said Welcome."""

    device: messages.GrantedDevice
    connection: socket.socket
    welcome: messages.Welcome
    fds: list[int]  # requests, replies, progress, places and, where it can be mapped, arena


def _open(granted: messages.Lease) -> list[int]:
    """Connects to the device servers and hands the sessions to the core. Returns the workers."""
    opened: list[_Opened] = []
    try:
        for device in granted.devices:
            opened.append(_open_device(device, len(granted.devices)))
        if len(opened) > 1:
            _introduce(opened)
    except BaseException:
        for one in opened:
            one.connection.close()
            for fd in one.fds:
                os.close(fd)
        raise
    members = []
    for one in opened:
        one.connection.settimeout(None)
        members.append(
            _core.Member(
                socket=one.connection.detach(),
                fds=one.fds,
                arena_bytes=one.welcome.arena_bytes,
                memory_bytes=one.device.info.memory_bytes,
                spill_bytes=one.welcome.spill_bytes,
                name=one.device.info.name,
                is_cpu=one.device.info.device == "cpu",
            )
        )
    _core.attach(granted.devices[0].session, members)
    return [one.welcome.worker_pid for one in opened]


def _open_device(device: messages.GrantedDevice, devices: int) -> _Opened:
    host_fd, host_bytes = _core.host_region()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(HELLO_TIMEOUT_S)
    try:
        connection.connect(device.address)
        hello = messages.Hello(messages.our_versions(), device.token, host_bytes, devices)
        messages.send(connection, hello, [host_fd])
        welcome, fds = messages.receive(connection, fds_max=5)
        if isinstance(welcome, messages.Refusal):
            raise LeaseError(welcome.reason)
        if not isinstance(welcome, messages.Welcome) or len(fds) < 4:
            raise LeaseError(f"device {device.info.name} answered {type(welcome).__name__}")
    except (OSError, ProtocolError) as error:
        connection.close()
        raise LeaseError(f"device {device.info.name} cannot be reached: {error}") from None
    except LeaseError:
        connection.close()
        raise
    return _Opened(device, connection, welcome, fds)


def _introduce(opened: list[_Opened]) -> None:
    """Tells each worker of the others, so that they copy from one another."""
    peers = messages.Peers(
        [messages.Peer(one.device.info.name, one.welcome.arena_bytes) for one in opened]
    )
    fds = [fd for one in opened for fd in one.fds[2:]]
    for one in opened:
        try:
            messages.send(one.connection, peers, fds)
        except OSError as error:
            raise LeaseError(f"device {one.device.info.name} was lost: {error}") from None


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
        _lease._head.close()
    _lease = None
    _embedded = None


def _at_exit() -> None:
    if _lease is not None and not _forked:
        _lease.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
