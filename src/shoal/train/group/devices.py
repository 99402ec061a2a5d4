"""The devices that training uses. Only this module knows how a lease numbers them."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import shoal
from shoal import _core
from shoal.device import leases
from shoal.errors import DeviceLostError, PeerLostError
from shoal.pool.local import local_pool

WATCH_EVERY_S = 0.1
STOPPED_AFTER_S = 0.5  # a worker that is stopped for so long counts as stalled
ENDED = ("", "Z", "X")  # states of a process that has ended
POLL_S = 0.0005  # during a wait for another group's device
SILENT_AFTER_S = 0.7  # without a heartbeat from another machine: three are missing


@dataclass(frozen=True)
class Member:
    """One device of the lease."""

    device: torch.device
    name: str
    memory_bytes: int
    worker_pid: int  # 0: on another machine

    def __str__(self) -> str:
        return f"{self.name} ({self.device})"


def members() -> tuple[Member, ...]:
    """Return the devices of this program's lease."""
    lease = leases.current()
    if lease is None:
        return ()
    return tuple(
        Member(device, granted.info.name, granted.info.memory_bytes, 0 if remote else pid)
        for device, granted, pid, remote in zip(
            lease.devices, lease.granted, lease.worker_pids, lease.by_network, strict=True
        )
    )


def lease_devices(count: int) -> shoal.Pool | None:
    """Make sure that there is a lease of at least `count` devices.

    A program without a lease gets one from $SHOAL_POOL. Without a pool, and with too few accelerators
    on this machine, a pool of CPU devices starts. It is returned, and the caller closes it.
    """
    if len(members()) >= count:
        return None
    if leases.current() is not None:
        raise shoal.LeaseError(
            f"{count} devices are needed, the lease has {len(members())}; lease more with "
            f"shoal.connect(devices={count}), or use fewer groups or devices in a group"
        )
    if os.environ.get("SHOAL_POOL") or len(local_pool.default_devices()) >= count:
        shoal.connect(devices=count)
        return None
    threads = max(1, (os.cpu_count() or 1) // count)
    pool = shoal.up([f"cpu,threads={threads}"] * count)
    shoal.connect(pool.url, devices=count)
    return pool


def has_lease() -> bool:
    """Return whether this program has a lease. Pinning memory without one would request one."""
    return leases.current() is not None


def set_current(device: torch.device) -> None:
    """Make `device` the current one of this thread, if it is a shoal device."""
    if device.type == "shoal":
        torch.accelerator.set_device_index(device.index)


def synchronize(device: torch.device) -> None:
    """Wait for everything issued so far. Raise its first error."""
    torch.accelerator.synchronize(device)


def synchronize_unless(device: torch.device, check: Callable[[], None]) -> None:
    """Synchronize a device of another group. `check` raises to end the wait."""
    _until_passed(record(device), check)
    synchronize(device)


def _until_passed(event: torch.Event, check: Callable[[], None]) -> None:
    while not event.query():
        check()
        time.sleep(POLL_S)


def record(device: torch.device) -> torch.Event:
    """Record an event in the device's stream, with the device's own time."""
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of the device's tensors after everything issued so far."""
    module = torch.get_device_module(device)
    return int(module.memory_allocated(device)) if device.type != "cpu" else 0


def add_from(target: torch.Tensor, source: torch.Tensor) -> None:
    """Add a tensor of another device. The device reads it there, without a copy."""
    if not _core.add_from(target, source):
        target.add_(source.to(target.device, non_blocking=True))


def copy_later(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor of another device lazily, when the target is first used: a device that needs many
    tensors one after another waits only for the first."""
    if not _core.copy_later(target, source):
        target.copy_(source, non_blocking=True)


class Reading:
    """A number on its way from the middle of a device's stream. Work that is issued later does not
    delay it.

    >>> loss = Reading(model(x).mean())
    >>> loss.value()
    """

    def __init__(self, number: torch.Tensor) -> None:
        source = number.detach()
        self._host = torch.full(source.shape, math.nan, dtype=source.dtype, pin_memory=True)
        self._host.copy_(source, non_blocking=True)
        self._arrived = record(source.device)

    def value_unless(self, check: Callable[[], None]) -> float:
        """Wait for a number of another group's device. `check` raises to end the wait."""
        _until_passed(self._arrived, check)
        return self.value()

    def value(self) -> float:
        """Wait for the number. Raise the device's errors up to it. NaN once the lease has ended."""
        self._arrived.synchronize()
        return self._host.item()


def elapsed_s(start: torch.Event, stop: torch.Event) -> tuple[float, float]:
    """Return the seconds between two events of one device, and those in which it worked. In the others
    it waited for other devices."""
    if stop.device.type != "shoal":
        seconds = start.elapsed_time(stop) / 1e3
        return seconds, seconds
    all_ms, waited_ms = _core.elapsed_ms(start.event_id, stop.event_id)
    return all_ms / 1e3, (all_ms - waited_ms) / 1e3


def is_lost(device: torch.device) -> bool:
    """Return whether the device is lost. Wait for its work, at most until its timeout."""
    try:
        synchronize(device)
    except PeerLostError:
        return False  # it waited for a lost one, but is well itself
    except DeviceLostError:
        return True
    except RuntimeError:
        return False  # an operator's error: the device itself is well
    return False


def heartbeat(device: torch.device) -> int | None:
    """Return the heartbeat count of the device's worker; None if unknown."""
    lease = leases.current()
    return lease.heartbeat(device.index - 1) if lease is not None else None


def give_up(device: torch.device) -> None:
    """Make other devices stop waiting for this one."""
    lease = leases.current()
    if lease is not None:
        lease.give_up(device.index - 1)


def mark_lost(device: torch.device, reason: str) -> None:
    """Treat a device as lost: freeing its tensors then sends no copies to other devices."""
    lease = leases.current()
    if lease is not None:
        lease.mark_lost(device.index - 1, reason)


class Watch:
    """Watches the workers and reports one that has ended, is stopped, or is silent.

    A program that waits for a device learns of its loss from the device itself. This thread learns it
    also while nothing waits, and sees a stopped process before the device's timeout. It cannot see a
    process on another machine, and reports its silence (`on_silent`): that may only be the network's.
    Such a device is lost when its own timeout ends.
    """

    def __init__(
        self,
        watched: Sequence[Member],
        on_lost: Callable[[Member, str], None],
        on_silent: Callable[[Member, float | None], None],
    ) -> None:
        self._watched = list(watched)
        self._on_lost = on_lost
        self._on_silent = on_silent
        self._stop = threading.Event()
        self._stopped_since: dict[int, float] = {}
        self._beats: dict[Member, tuple[int, float]] = {}  # the last count, and when it came
        self._silent: set[Member] = set()
        self._thread = threading.Thread(target=self._run, name="shoal-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)

    def _run(self) -> None:
        while not self._stop.wait(WATCH_EVERY_S):
            for member in list(self._watched):
                why = self._trouble(member) if member.worker_pid else None
                if why is not None:
                    self._watched.remove(member)
                    self._on_lost(member, why)
                elif not member.worker_pid:
                    self._listen(member)

    def _listen(self, member: Member) -> None:
        """Report once when a device falls silent, and once when its heartbeat is back."""
        beat, now = heartbeat(member.device), time.monotonic()
        if beat is None:
            return
        last, since = self._beats.setdefault(member, (beat, now))
        if beat != last:
            self._beats[member] = beat, now
            if member in self._silent:
                self._silent.remove(member)
                self._on_silent(member, None)
        elif now - since > SILENT_AFTER_S and member not in self._silent:
            self._silent.add(member)
            self._on_silent(member, now - since)

    def _trouble(self, member: Member) -> str | None:
        state = process_state(member.worker_pid)
        if state in ENDED:
            return "the worker has ended"
        if state != "T":
            self._stopped_since.pop(member.worker_pid, None)
            return None
        since = self._stopped_since.setdefault(member.worker_pid, time.monotonic())
        if time.monotonic() - since < STOPPED_AFTER_S:
            return None
        return "the worker is stopped and does not compute"


def has_ended(member: Member) -> bool:
    """Return whether the worker's process has ended; False for one on another machine."""
    return bool(member.worker_pid) and process_state(member.worker_pid) in ENDED


def process_state(pid: int) -> str:
    """Return the state letter of a process (see proc(5)); empty if it does not exist."""
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)  # unbuffered: this runs often
    except FileNotFoundError:
        return ""
    try:
        fields = os.read(file, 1024).rpartition(b")")[2].split()
    except ProcessLookupError:
        return ""
    finally:
        os.close(file)
    return fields[0].decode() if fields else ""
