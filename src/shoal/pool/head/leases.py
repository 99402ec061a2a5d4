"""Who holds which devices: a pure table. Requests in, grants out; no clock, socket or randomness."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from shoal.pool.access.codes import Quota
from shoal.pool.base.limits import SESSIONS_MAX
from shoal.pool.head.placement import LeaseRefused, Offer, Request, choose
from shoal.units import show_bytes

__all__ = [
    "SESSIONS_MAX",
    "Device",
    "Granted",
    "Held",
    "LeaseRefused",
    "LeaseTable",
    "Lost",
    "Request",
    "Share",
]


@dataclass(slots=True)
class Device:
    """One device of the pool."""

    number: int
    name: str
    memory_bytes: int
    kind: str = ""
    node: str = ""
    present: bool = True  # False: its node is silent; sessions may run, new ones do not start


@dataclass(frozen=True, slots=True)
class Share:
    """A session's part of a device."""

    device: int
    session: int
    memory_bytes: int

    @property
    def part(self) -> tuple[int, int]:
        """What tells it from all others that are held: sessions are of a whole lease."""
        return self.device, self.session


@dataclass(frozen=True, slots=True)
class Granted:
    lease: int
    epoch: int  # grows with every lease: a holder that comes back late has a lower one
    shares: tuple[Share, ...]
    client: str = ""
    until: float | None = None  # in the caller's clock


@dataclass(frozen=True, slots=True)
class Held:
    """What a device server says it has a grant or a worker for."""

    device: int
    session: int
    lease: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Shares that a lease no longer has. `ended`: they were its last."""

    lease: int
    shares: tuple[Share, ...]
    ended: bool


@dataclass(slots=True)
class LeaseTable:
    """Invariants: a session number belongs to at most one lease, whose devices all share it (they are
    one address space); the shares of a device are never more than its memory (a lease that asked for
    no amount got what was free); a client with a quota never holds more than that; epochs only grow.
    """

    devices: dict[int, Device] = field(default_factory=dict)
    leases: dict[int, Granted] = field(default_factory=dict)
    quotas: dict[str, Quota] = field(default_factory=dict)
    epoch: int = 0
    next_session: int = 1

    # --- devices -----------------------------------------------------------------------------------

    def add_device(
        self, number: int, name: str, memory_bytes: int, kind: str = "", node: str = ""
    ) -> None:
        """Add a device, or note that it is back: it keeps its shares."""
        self.devices[number] = Device(number, name, memory_bytes, kind, node)

    def absent(self, number: int) -> None:
        """Note that its node is silent. New leases do not get the device until it returns."""
        if number in self.devices:
            self.devices[number].present = False

    def remove_device(self, number: int) -> list[Lost]:
        """Remove a device and its sessions. Leases keep their other devices."""
        self.devices.pop(number, None)
        return self.lose(lambda share: share.device == number)

    def booked_bytes(self, number: int) -> int:
        return sum(s.memory_bytes for s in self.shares_of(number))

    def shares_of(self, number: int) -> list[Share]:
        return [s for g in self.leases.values() for s in g.shares if s.device == number]

    def free_bytes(self, number: int) -> int:
        return max(0, self.devices[number].memory_bytes - self.booked_bytes(number))

    def offers(self) -> list[Offer]:
        """Return every present device and its free memory."""
        booked: dict[int, list[int]] = {n: [] for n in self.devices}
        for share in (s for g in self.leases.values() for s in g.shares):
            booked.setdefault(share.device, []).append(share.memory_bytes)
        return [
            Offer(
                d.number, d.name, d.node, d.kind, d.memory_bytes,
                max(0, d.memory_bytes - sum(booked[d.number])), len(booked[d.number]),
            )
            for d in self.devices.values()
            if d.present
        ]  # fmt: skip

    # --- leases ------------------------------------------------------------------------------------

    def grant(self, request: Request) -> Granted:
        """Return a lease for `request`. A refusal changes nothing."""
        chosen = self._choose(request)
        shares_bytes = [offer.share_bytes(request) for offer in chosen]
        if request.memory_bytes is None and request.fraction is None:  # "what there is for me"
            most_bytes = self._quota_left_bytes(request.client) // request.count
            shares_bytes = [max(1, min(amount, most_bytes)) for amount in shares_bytes]
        self._check_quota(request.client, len(chosen), sum(shares_bytes))
        session = self._session(request.avoid)
        self.epoch += 1
        shares = tuple(
            Share(offer.number, session, amount)
            for offer, amount in zip(chosen, shares_bytes, strict=True)
        )
        granted = Granted(self.epoch, self.epoch, shares, request.client, request.until)
        self.leases[granted.lease] = granted
        return granted

    def resume(self, lease: int, epoch: int, client: str) -> Granted:
        """Return the lease of a returning holder. Refuse it if it is another's by now."""
        granted = self.leases.get(lease)
        if granted is None or granted.epoch != epoch or granted.client != client:
            raise LeaseRefused(
                f"lease {lease} has ended, and its devices may have gone to others. "
                "Call shoal.connect() for a new one."
            )
        return granted

    def release(self, lease: int) -> Granted | None:
        """End a lease and free what it held. Ignore an unknown lease."""
        return self.leases.pop(lease, None)

    def restore(self, granted: Iterable[Granted], epoch: int, next_session: int) -> None:
        """Take over the leases of an earlier head."""
        self.leases = {g.lease: g for g in granted}
        self.epoch = max([epoch, *(g.epoch for g in self.leases.values())])
        self.next_session = next_session

    def expired(self, now: float) -> list[int]:
        """Return the leases whose time is over."""
        return [g.lease for g in self.leases.values() if g.until is not None and g.until <= now]

    def held_by(self, client: str) -> list[Granted]:
        return [g for g in self.leases.values() if g.client == client]

    # --- what was lost -----------------------------------------------------------------------------

    def session_ended(self, device: int, session: int, epoch: int) -> list[Lost]:
        """Note that the worker of this session and epoch is gone, as its device server reports."""
        holder = next((g for g in self.leases.values() if g.epoch == epoch), None)
        ended = [s for s in holder.shares if s.part == (device, session)] if holder else []
        return self.lose(lambda share: share in ended)

    def reconcile(self, devices: set[int], held: Iterable[Held]) -> tuple[list[Held], list[Lost]]:
        """Take in a node that is back with `devices`, whose servers hold `held`.

        Returns what they must revoke (late holders: the lease has ended here, or is another one by
        now) and what leases have lost (no worker holds it any more).
        """
        known = {
            Held(s.device, s.session, g.lease, g.epoch)
            for g in self.leases.values()
            for s in g.shares
            if s.device in devices
        }
        there = set(held)
        gone = {(h.device, h.session) for h in known - there}
        lost = self.lose(lambda share: share.part in gone)
        return sorted(there - known, key=lambda h: (h.device, h.session)), lost

    def lose(self, is_lost: Callable[[Share], bool]) -> list[Lost]:
        """Remove the shares for which `is_lost(share)` from their leases."""
        found = []
        for granted in list(self.leases.values()):
            gone = tuple(s for s in granted.shares if is_lost(s))
            if not gone:
                continue
            kept = tuple(s for s in granted.shares if s not in gone)
            if kept:
                self.leases[granted.lease] = replace(granted, shares=kept)
            else:
                del self.leases[granted.lease]
            found.append(Lost(granted.lease, gone, ended=not kept))
        return found

    # --- refusals ----------------------------------------------------------------------------------

    def _choose(self, request: Request) -> list[Offer]:
        """Choose devices. A refusal also names what the client's quota forbids."""
        silent = [d.name for d in self.devices.values() if not d.present]
        try:
            return choose(request, self.offers(), silent)
        except LeaseRefused as refused:
            asked_bytes = max(0, request.memory_bytes or 0) * max(0, request.count)
            over = self._over_quota(request.client, request.count, asked_bytes)
            if over is not None:
                refused.reasons += over.reasons
                refused.unblock += over.unblock
            raise

    def _check_quota(self, client: str, count: int, memory_bytes: int) -> None:
        over = self._over_quota(client, count, memory_bytes)
        if over is not None:
            raise over

    def _over_quota(self, client: str, count: int, memory_bytes: int) -> LeaseRefused | None:
        quota = self.quotas.get(client)
        if quota is None:
            return None
        shares = [s for g in self.held_by(client) for s in g.shares]
        devices = len(shares) + count
        total = sum(s.memory_bytes for s in shares) + memory_bytes
        reasons = []
        if quota.devices is not None and devices > quota.devices:
            reasons.append(
                f"{client} may hold {quota.devices} device(s) at once and would hold {devices}"
            )
        if quota.memory_bytes is not None and total > quota.memory_bytes:
            reasons.append(
                f"{client} may hold {show_bytes(quota.memory_bytes)} at once and would hold "
                f"{show_bytes(total)}"
            )
        if not reasons:
            return None
        unblock = ["the end of another program of yours"] if shares else []
        unblock += ["asking for less", "a larger quota: the pool's owner gives it with a new code"]
        return LeaseRefused(f"the quota of {client} does not allow this.", reasons, unblock)

    def _quota_left_bytes(self, client: str) -> int:
        quota = self.quotas.get(client)
        if quota is None or quota.memory_bytes is None:
            return 2**63
        held = sum(s.memory_bytes for g in self.held_by(client) for s in g.shares)
        return max(0, quota.memory_bytes - held)

    def _session(self, avoid: frozenset[int]) -> int:
        """Return the next free number, in a circle: one that was just given back comes last."""
        taken = avoid | {s.session for g in self.leases.values() for s in g.shares}
        circle = ((self.next_session - 1 + i) % SESSIONS_MAX + 1 for i in range(SESSIONS_MAX))
        found = next((n for n in circle if n not in taken), None)
        if found is None:
            raise LeaseRefused(f"all {SESSIONS_MAX} session numbers of the pool are in use")
        self.next_session = found % SESSIONS_MAX + 1
        return found
