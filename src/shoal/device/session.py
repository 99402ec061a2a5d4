"""Leases of this program: joining a pool, starting one where there is none, and giving it back."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
from contextlib import suppress
from types import TracebackType

import torch

from shoal import _core
from shoal.errors import LeaseError, ProtocolError
from shoal.pool import client, home, local, messages
from shoal.pool.keeper import Keeper
from shoal.pool.spec import parse_memory

_log = logging.getLogger("shoal")

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
        self,
        head: client.Connection,
        granted: messages.Lease,
        worker_pids: list[int],
        sockets: list[socket.socket],
    ) -> None:
        self.url = head.url
        self.worker_pids = worker_pids  # by device; on this machine
        self.epoch = granted.epoch
        self.granted = granted.devices
        self.end_reason: str | None = None  # why the pool took devices back, if it did
        self._head = head
        self._sockets = sockets
        self._counting = threading.Lock()  # held while the keeper reads the core's counters
        self._closing = False
        self._keeper: Keeper | None = None
        if granted.secret:  # a standing pool: the lease outlives this connection, and even the head
            self._keeper = Keeper(head, granted, self._on_lost, self._uses)

    @property
    def devices(self) -> list[torch.device]:
        """The member devices. `torch.device("shoal")` is the first of them."""
        return [torch.device("shoal", i) for i in range(len(self.granted))]

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
            with self._counting:
                self._closing = True
            _core.detach_all()
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

    def _abandon(self) -> None:
        """In a forked child: the parent's lease goes on."""
        if self._keeper is None:
            os.close(self._head.socket.detach())
        else:
            self._keeper.abandon()
        for copy in self._sockets:
            copy.close()

    def _on_lost(self, sessions: list[int], reason: str) -> None:
        """Runs in the keeper's thread: whoever waits for these devices gets DeviceLostError now."""
        self.end_reason = reason
        for device, copy in zip(self.granted, self._sockets, strict=True):
            if device.session in sessions:
                _log.warning("shoal: device %s of this lease is lost: %s", device.info.name, reason)
                with suppress(OSError):  # it may be gone already
                    copy.shutdown(socket.SHUT_RDWR)

    def _uses(self) -> list[messages.SessionUse]:
        """What the sessions have done so far."""
        found = []
        with self._counting:
            for index, device in enumerate(() if self._closing else self.granted):
                traffic, memory = _core.traffic(index), _core.memory_use(index)
                found.append(
                    messages.SessionUse(
                        device.session, memory["allocated_bytes"], traffic["messages"],
                        traffic["bytes_in"], traffic["bytes_out"],
                    )
                )  # fmt: skip
        return found

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
    url: str | None = None,
    *,
    devices: int | None = None,
    memory: int | float | str | None = None,
    kind: str | None = None,
    duration_s: float | None = None,
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

    >>> lease = shoal.connect(devices=1, memory="1GiB")
    """
    global _lease, _embedded
    memory_bytes, fraction = parse_memory(memory)
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
        sockets: list[socket.socket] = []
        pids: list[int] = []
        try:
            for index, device in enumerate(granted.devices):
                connection, pid = _open_session(index, device, head, granted)
                pids.append(pid)
                if granted.secret:
                    sockets.append(connection)
                else:
                    connection.close()
        except BaseException:
            _core.detach_all()
            with suppress(LeaseError):
                if granted.secret:  # closing would not end it: a client may come back
                    head.ask(messages.Release(), HELLO_TIMEOUT_S)
            head.close()
            for copy in sockets:
                copy.close()
            raise
        _lease = Lease(head, granted, pids, sockets)
        return _lease


def _program() -> str:
    """What to call this program where people look at the pool."""
    return f"{os.path.basename(sys.argv[0] or 'python')} (pid {os.getpid()})"[:200]


def _open_session(
    index: int, device: messages.GrantedDevice, head: client.Connection, lease: messages.Lease
) -> tuple[socket.socket, int]:
    """Connects to one device server and hands the rings to the core.

    Returns a second descriptor of the connection, which can shut it down, and the worker's pid.
    """
    host_fd, host_bytes = _core.host_region()
    connection = _reach(device, head, lease)
    fds: list[int] = []
    try:
        hello = messages.Hello(messages.our_versions(), device.token, host_bytes)
        messages.send(connection, hello, [host_fd])
        welcome, fds = messages.receive(connection, fds_max=4)
        if isinstance(welcome, messages.Refusal):
            raise LeaseError(welcome.reason)
        if not isinstance(welcome, messages.Welcome):
            raise LeaseError(f"device {device.info.name} answered {type(welcome).__name__}")
    except (OSError, ProtocolError) as error:
        connection.close()
        raise LeaseError(f"device {device.info.name} cannot be reached: {error}") from None
    except LeaseError:
        connection.close()
        raise
    connection.settimeout(None)
    copy = connection.dup()
    _core.attach(
        socket=connection.detach(),
        fds=fds,
        arena_bytes=welcome.arena_bytes,
        memory_bytes=device.info.memory_bytes,
        session=device.session,
        index=index,
        name=device.info.name,
        is_cpu=device.info.device == "cpu",
    )
    return copy, welcome.worker_pid


def _reach(
    device: messages.GrantedDevice, head: client.Connection, lease: messages.Lease
) -> socket.socket:
    """A connection to the device server: by shared memory if it is on this machine, else by network."""
    name = device.info.name
    here = device.machine in ("", home.machine_id())
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(HELLO_TIMEOUT_S)
    try:
        if here:
            connection.connect(device.address)
            return connection
        error: Exception = OSError("it is on another machine")
    except OSError as refused:  # the same machine, but another network namespace or container
        error = refused
    connection.close()
    if device.network is None:
        raise LeaseError(f"device {name} cannot be reached: {error}")
    _attach_over_network(device, device.network, head, lease)
    raise LeaseError(f"device {name} answered nothing that this version understands")


def _attach_over_network(
    device: messages.GrantedDevice,
    endpoint: messages.NetworkEndpoint,
    head: client.Connection,
    lease: messages.Lease,
) -> None:
    """Shows lease and certificate at the device server's door. The data plane will go on from here;
    until then the door's answer is a refusal that says so.
    """
    identity = client.identity_for(head.url)
    try:
        with client.open_tls(
            endpoint.host or head.host, endpoint.port, identity, endpoint.server_name,
            HELLO_TIMEOUT_S,
        ) as connection:  # fmt: skip
            connection.settimeout(HELLO_TIMEOUT_S)
            attach = messages.Attach(
                messages.our_versions(), device.token, lease.lease, lease.epoch
            )
            messages.send(connection, attach)
            answer, _ = messages.receive(connection)
    except (OSError, ProtocolError) as error:
        raise LeaseError(f"device {device.info.name} cannot be reached: {error}") from None
    if isinstance(answer, messages.Refusal):
        raise LeaseError(f"device {device.info.name}: {answer.reason}")


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
    _forked = _core.abandon_all() or _forked
    if _lease is not None:
        _lease._abandon()
    _lease = None
    _embedded = None


def _at_exit() -> None:
    if _lease is not None and not _forked:
        _lease.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
