"""Who holds which devices: a pure table. Requests in, grants out; no clock, socket or randomness."""

from __future__ import annotations

from dataclasses import dataclass, field

SESSIONS_MAX = 2047  # session numbers are eleven bits of an address, and 0 is none


class LeaseRefused(Exception):
    """The request cannot be granted; the text says why and what would help."""


@dataclass(slots=True)
class Device:
    """One device of the pool and what is granted of it."""

    number: int
    name: str
    memory_bytes: int
    granted: dict[int, int] = field(default_factory=dict)  # session -> bytes

    @property
    def free_bytes(self) -> int:
        return max(0, self.memory_bytes - sum(self.granted.values()))


@dataclass(frozen=True, slots=True)
class Share:
    """A session's part of a device."""

    device: int
    session: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Granted:
    lease: int
    epoch: int  # grows with every lease: a holder that comes back late has a lower one
    shares: tuple[Share, ...]


@dataclass(slots=True)
class LeaseTable:
    """Invariant: a session number belongs to at most one lease (all its devices share one address
    space), and no device grants more than it has, save
    for leases that asked for no amount: those share the device's memory first come, first served.
    """

    devices: dict[int, Device] = field(default_factory=dict)
    leases: dict[int, Granted] = field(default_factory=dict)
    epoch: int = 0
    next_session: int = 1

    def add_device(self, number: int, name: str, memory_bytes: int) -> None:
        self.devices[number] = Device(number, name, memory_bytes)

    def remove_device(self, number: int) -> None:
        """The device is gone. Leases that had it keep their other devices."""
        self.devices.pop(number, None)

    def grant(self, count: int, memory_bytes: int | None, avoid: set[int]) -> Granted:
        """A lease of `count` devices, the freest first. A refusal changes nothing."""
        if memory_bytes is not None and memory_bytes < 1:
            raise LeaseRefused(f"{memory_bytes} bytes were asked for. Ask for at least one.")
        if count < 1 or count > len(self.devices):
            raise LeaseRefused(
                f"{count} devices were asked for, the pool has {len(self.devices)}. Ask for fewer, "
                "or start the pool with more."
            )
        fitting = [
            d
            for d in self.devices.values()
            if d.free_bytes >= (memory_bytes if memory_bytes is not None else 1)
        ]
        if len(fitting) < count:
            raise LeaseRefused(self._too_little(count, memory_bytes, len(fitting)))
        chosen = sorted(fitting, key=lambda d: (len(d.granted), -d.free_bytes, d.number))[:count]
        chosen.sort(key=lambda d: d.number)
        session = self._session(avoid)
        self.epoch += 1
        shares = []
        for device in chosen:
            share_bytes = memory_bytes if memory_bytes is not None else device.free_bytes
            device.granted[session] = share_bytes
            shares.append(Share(device.number, session, share_bytes))
        granted = Granted(self.epoch, self.epoch, tuple(shares))
        self.leases[granted.lease] = granted
        return granted

    def release(self, lease: int) -> Granted | None:
        """Ends a lease; what it held is free again. Unknown leases are ignored."""
        granted = self.leases.pop(lease, None)
        if granted is not None:
            for share in granted.shares:
                if share.device in self.devices:
                    self.devices[share.device].granted.pop(share.session, None)
        return granted

    def _session(self, avoid: set[int]) -> int:
        """The next free number, in a circle: one that was just given back is used last."""
        taken = avoid | {s.session for g in self.leases.values() for s in g.shares}
        circle = ((self.next_session - 1 + i) % SESSIONS_MAX + 1 for i in range(SESSIONS_MAX))
        found = next((n for n in circle if n not in taken), None)
        if found is None:
            raise LeaseRefused(f"all {SESSIONS_MAX} session numbers of the pool are in use")
        self.next_session = found % SESSIONS_MAX + 1
        return found

    def _too_little(self, count: int, memory_bytes: int | None, fitting: int) -> str:
        wanted = "any memory" if memory_bytes is None else f"{memory_bytes} bytes"
        free = ", ".join(
            f"{d.name}: {d.free_bytes} of {d.memory_bytes} bytes free"
            for d in self.devices.values()
        )
        return (
            f"{count} device(s) with {wanted} free were asked for, {fitting} have that ({free}). "
            "Ask for less memory, or wait until another program ends."
        )
