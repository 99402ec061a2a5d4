"""Leases of this program: connects to a pool or starts one, and gives the lease back."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from contextlib import suppress
from typing import get_args

import msgspec
import torch

from shoal import _core, integrations, views
from shoal.device import by_name, guest
from shoal.device.worker_connections import Opened, Transport, open_workers
from shoal.errors import LeaseError, PoolError, ProtocolError
from shoal.pool.base import at_exit, limits, process
from shoal.pool.client import head_connection, lease_wait
from shoal.pool.client.lease_keepalive import LeaseKeepalive
from shoal.pool.local import local_pool
from shoal.pool.node.spec import parse_memory
from shoal.pool.wire import frames, messages
from shoal.pool.wire.end_reasons import End, Why
from shoal.pool.wire.message_fields import SessionPart
from shoal.units import show_bytes
from shoal_autoload import asked, declined

_log = logging.getLogger("shoal")

_lock = threading.RLock()
_lease: Lease | None = None
_embedded: local_pool.Pool | None = None
_forked = False  # this process is a fork of one that held a lease
# By what the core saw of a lost device: the reason, and how many seconds the client waits for the
# head's, which is more exact.
_SEEN = {
    _core.SEEN_CLOSED: (Why.UNKNOWN, limits.LOSS_REASON_S),
    _core.SEEN_SILENT: (Why.CUT, limits.CUT_REASON_S),
    _core.SEEN_HUNG: (Why.WORKER_HUNG, 0.0),
    _core.SEEN_BROKEN: (Why.WORKER_FAILED, limits.LOSS_REASON_S),
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
        opened: list[Opened],
        sockets: list[socket.socket],
    ) -> None:
        self.url = head.url
        self.worker_pids = [one.welcome.worker_pid for one in opened]  # by device; on its machine
        self.by_network = [one.remote is not None for one in opened]  # by device
        self.attached = [one.remote for one in opened]  # by device; None: on this machine
        self.number = granted.lease
        self.epoch = granted.epoch
        self.granted = granted.devices
        self._end: End | None = None
        # Held while devices are marked lost: whoever has the error finds the reason here, and
        # whoever reads the reason finds the devices lost.
        self._marking = threading.RLock()
        self._session = granted.devices[0].session
        self._ends: dict[SessionPart, End] = {}  # of the devices that are lost
        self._guessed: set[SessionPart] = set()  # of them, those that the head has not explained
        self._explained = threading.Condition()  # notified when there are more of them
        self._asking = threading.Lock()  # held by the thread that receives from the head
        self._head = head
        self._sockets = sockets
        self._counting = threading.Lock()  # held while counters of the devices are read
        self._progress = [one.progress for one in opened]
        self._closing = False
        self._keepalive: LeaseKeepalive | None = None
        if granted.secret:  # a standing pool: the lease outlives this connection, and even the head
            self._keepalive = LeaseKeepalive(head, granted, self._on_lost, self._uses)

    @property
    def devices(self) -> list[torch.device]:
        """The member devices, for those who place by hand: `torch.device("shoal")` is all of them."""
        return [torch.device("shoal", i + 1) for i in range(len(self.granted))]

    def _repr_html_(self) -> str:
        """What a notebook shows: the devices of the lease, and why they were lost if they were."""
        rows = [
            [f"shoal:{i}", one.info.name, one.info.kind, show_bytes(one.info.memory_bytes)]
            for i, one in enumerate(self.granted, 1)
        ]
        state = self.end_reason or ("in use" if self.active else "closed")
        return views.table(f"lease {self.number}: {state}", ["", "device", "kind", "memory"], rows)

    @property
    def active(self) -> bool:
        return _lease is self

    @property
    def end(self) -> End | None:
        """Why the pool took devices back, if it did: a code and a text."""
        with self._marking:
            return self._end

    @property
    def end_reason(self) -> str | None:
        """Why the pool took devices back, if it did."""
        end = self.end
        return end.text if end is not None else None

    def heartbeat(self, device: int) -> int | None:
        """Return a number that the worker of a device (0 is the first) increments five times a second,
        even during a long call. None once the lease is closed. Reads shared memory only."""
        with self._counting:
            progress = self._progress[device]
            if self._closing or progress is None:
                return None
            return _core.heartbeat(progress)

    def give_up(self, device: int) -> None:
        """Declare the worker of a device (0 is the first) stuck: other workers on this machine stop
        waiting for its results and raise. A new heartbeat of the worker revokes this."""
        with self._counting:
            if not self._closing:
                _core.give_up(device + 1)

    def mark_lost(self, device: int, reason: str) -> None:
        """Treat a device (0 is the first) as lost from now on, before its own deadline says so."""
        with self._counting:
            if not self._closing:
                _core.report_lost(self._session, device, reason)

    def close(self) -> None:
        """Give the devices back. Tensors on them are gone."""
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
        """Release the lease at the head first: else it would hear of a worker that lost its client."""
        if self._keepalive is None:
            with suppress(ProtocolError):
                self._head.send(messages.Release())
            self._head.close()
        else:
            self._keepalive.stop()
        for copy in self._sockets:  # even if the head is away, the workers end
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
        if self._keepalive is None:
            os.close(self._head.socket.detach())
        else:
            self._keepalive.abandon()
        for copy in self._sockets:
            copy.close()

    def _on_lost(self, parts: list[SessionPart], end: End, guessed: bool = False) -> None:
        """Mark devices of the lease as lost: threads that wait for them get DeviceLostError now."""
        if self._closing:
            return
        with self._marking:
            new = [p for p in parts if p not in self._ends or p in self._guessed]
            for member, device in enumerate(self.granted):
                if device.part in new:
                    self._mark(member, end, guessed)
            if new and (self._end is None or self._end in map(self._ends.get, self._guessed)):
                self._end = end
        with self._explained:
            self._ends.update((p, end) for p in new)
            self._guessed = self._guessed | set(new) if guessed else self._guessed - set(new)
            self._explained.notify_all()

    def _mark(self, member: int, end: End, guessed: bool) -> None:
        if not guessed:
            _core.report_lost(self._session, member, end.text)
        name = self.granted[member].info.name
        _log.warning("shoal: device %s of this lease is lost: %s", name, end.text)
        if self._sockets:
            with suppress(OSError):  # it may be gone already
                self._sockets[member].shutdown(socket.SHUT_RDWR)

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
        """Wait a moment for the head's reason of a loss."""
        deadline = time.monotonic() + wait_s
        if self._keepalive is not None:
            if self._keepalive.ask(part, seen):
                with self._explained:
                    self._explained.wait_for(lambda: part in self._ends or self._closing, wait_s)
            return
        with self._asking:  # an embedded pool: no other thread receives from the head
            try:
                if part not in self._ends:
                    self._head.send(messages.LostSight([part], seen))
                while part not in self._ends:
                    message = self._head.receive(max(0.0, deadline - time.monotonic()))
                    if isinstance(message, messages.SessionsLost):
                        self._on_lost(message.parts, message.end)
            except frames.Silence:
                return
            except ProtocolError:
                self._on_lost([device.part for device in self.granted], End(Why.HEAD_ENDED))

    def _uses(self) -> list[messages.SessionUse]:
        """Return what the session has done so far on each device."""
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
    wait: bool | float | None = None,
) -> Lease:
    """Lease devices of a pool. An earlier lease of this program ends.

    Args:
        url: the pool. Default: $SHOAL_POOL, else the pool that was joined (`shoal join`), else one
            that this program starts on its machine.
        devices: number of devices. Default: one.
        memory: of each device: in bytes, like "8GiB", or a fraction like "50%" or 0.5. Default: all
            free memory.
        kind: of the devices, like "a100" or "a100|v100".
        duration_s: seconds until the lease ends. Default: until it is given back.
        transport: "auto" shares memory with devices on this machine and reaches others by network;
            "network" reaches all of them by network, to test or measure remote use.
        wait: True waits until devices are free, a number waits so many seconds. Default:
            $SHOAL_WAIT, else a request that does not fit is refused at once. Ctrl-C ends the wait.

    >>> lease = shoal.connect(devices=1, memory="1GiB")
    """
    global _lease, _embedded
    devices, memory, kind = _needs(devices, memory, kind)
    memory_bytes, fraction = parse_memory(memory)
    wait = lease_wait.parse_wait(wait)
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
            devices,
            memory_bytes,
            _core.sessions_in_use(),
            fraction,
            kind,
            duration_s,
            process.program_name(),
            _ticket(url),
            wait is not False,
            None if isinstance(wait, bool) else wait,
        )
        head, granted = lease_wait.ask_lease(url, request)
        if not isinstance(granted, messages.Lease):
            raise LeaseError(f"the pool answered {type(granted).__name__} to a request for a lease")
        _lease = _open(head, granted, transport)
        guest.show()
        by_name.adopt()
        if not declined():
            integrations.install()  # helps libraries with a model on the device
        return _lease


def _open(head: head_connection.Connection, granted: messages.Lease, transport: Transport) -> Lease:
    """Connect to the workers of a lease. If one cannot be reached, give the lease back."""
    try:
        opened, sockets = open_workers(head, granted, transport)
    except BaseException:
        with suppress(LeaseError):
            if granted.secret:  # closing would not end it: a client may come back
                head.ask(messages.Release(), limits.WORKER_ANSWER_S)
        head.close()
        raise
    return Lease(head, granted, opened, sockets)


def _needs(
    devices: int | None, memory: int | float | str | None, kind: str | None
) -> tuple[int | None, int | float | str | None, str | None]:
    """Return what the program asks for, else what `shoal run` was told."""
    told = msgspec.json.decode(os.environ.get("SHOAL_NEEDS") or "{}")
    return (
        told.get("devices") if devices is None else devices,
        told.get("memory") if memory is None else memory,
        told.get("kind") if kind is None else kind,
    )


def _ticket(url: str) -> str:
    """Return the ticket of the task that this program is, for the pool that runs it."""
    return os.environ.get("SHOAL_TICKET", "") if url == os.environ.get("SHOAL_POOL") else ""


def prepare() -> None:
    """Register the kernels. The first use of the device does this."""
    _core.register_kernels()


def ensure() -> None:
    """Connect, if this program does not have a lease."""
    with _lock:
        _refuse_in_fork()
        if _lease is None:
            try:
                connect()
            except (LeaseError, PoolError) as error:
                if not asked():
                    raise
                asked_by = f"Shoal was asked for by {asked()}. To keep programs from choosing it"
                kind = PoolError if isinstance(error, PoolError) else LeaseError
                raise kind(f"{error}\n{asked_by}: export SHOAL_DEFAULT=0") from None


def current() -> Lease | None:
    """Return this program's lease, if it has one."""
    return _lease


def device_info() -> list[messages.DeviceInfo]:
    """Return the leased devices.

    >>> for device in shoal.device_info():
    ...     print(device.name, device.memory_bytes)
    """
    ensure()
    return [d.info for d in _lease.granted] if _lease is not None else []


def whole(devices: list[messages.DeviceInfo]) -> messages.DeviceInfo:
    """Return the lease as one device."""
    return msgspec.structs.replace(
        devices[0],
        name="+".join(d.name for d in devices),
        memory_bytes=sum(d.memory_bytes for d in devices),
        free_bytes=sum(d.free_bytes for d in devices),
        speed=sum(d.speed for d in devices),
        threads=sum(d.threads for d in devices),
        capability=min(d.capability for d in devices),
        gpu=None,
    )


def _explain_loss(session: int, member: int, seen: int, reason: str) -> str:
    lease = _lease
    if lease is None or lease._session != session or _forked:
        return reason
    return lease._explain(member, seen, reason)


def in_bad_fork() -> bool:
    """Return whether this process is a fork of one that uses the device: it cannot use it as well."""
    return _forked


def _refuse_in_fork() -> None:
    if _forked:
        raise LeaseError(
            "a fork of a process that uses shoal cannot use it as well. Start the process with "
            "torch.multiprocessing.set_start_method('spawn'), or keep shoal tensors out of it"
        )


def _after_fork() -> None:
    """In the child: neither write to the parent's streams nor keep them open."""
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
at_exit.register(_at_exit)
