"""The lease table without indices, as a reference: it looks at every device for every request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from shoal.pool.access.codes import Quota
from shoal.pool.head.leases import SESSIONS_MAX, Device, Granted, Held, Lost, Share
from shoal.pool.head.placement import LeaseRefused, Request, choose
from shoal.tasks.room import Offer
from shoal.units import show_bytes


@dataclass(slots=True)
class ScanningTable:
    """Every question is answered by a look at all devices or all leases."""

    devices: dict[int, Device] = field(default_factory=dict)
    leases: dict[int, Granted] = field(default_factory=dict, init=False)
    quotas: dict[str, Quota] = field(default_factory=dict)
    epoch: int = 0
    next_session: int = 1
    _by_device: dict[int, dict[int, Share]] = field(default_factory=dict, init=False)  # by session
    _booked_bytes: dict[int, int] = field(default_factory=dict, init=False)  # by device
    _by_client: dict[str, dict[int, Granted]] = field(default_factory=dict, init=False)  # by lease
    _by_owner: dict[str, dict[int, Granted]] = field(default_factory=dict, init=False)  # by lease
    _by_session: dict[int, int] = field(default_factory=dict, init=False)  # the lease
    _reserved: dict[str, dict[int, int]] = field(
        default_factory=dict, init=False
    )  # key: device: bytes
    _aside: set[int] = field(default_factory=set, init=False)  # leases that are suspended

    def _put(self, granted: Granted) -> None:
        """Add a lease, or replace it by one with other shares."""
        before = self.leases.get(granted.lease)
        if before is not None:
            self._forget(before)
        self.leases[granted.lease] = granted
        self._by_client.setdefault(granted.client, {})[granted.lease] = granted
        self._by_owner.setdefault(granted.accountable, {})[granted.lease] = granted
        for share in granted.shares:
            self._by_session[share.session] = granted.lease
            self._by_device.setdefault(share.device, {})[share.session] = share
            booked_bytes = 0 if granted.lease in self._aside else share.memory_bytes
            self._booked_bytes[share.device] = self.booked_bytes(share.device) + booked_bytes

    def _remove(self, lease: int) -> Granted | None:
        granted = self.leases.pop(lease, None)
        if granted is not None:
            self._forget(granted)
            self._aside.discard(lease)
        return granted

    def _forget(self, granted: Granted) -> None:
        """Take a lease out of the indices."""
        for index, name in (
            (self._by_client, granted.client),
            (self._by_owner, granted.accountable),
        ):
            del index[name][granted.lease]
            if not index[name]:
                del index[name]
        for share in granted.shares:
            self._by_session.pop(share.session, None)
            on_device = self._by_device[share.device]
            del on_device[share.session]
            if granted.lease not in self._aside:
                self._booked_bytes[share.device] -= share.memory_bytes
            if not on_device:
                del self._by_device[share.device], self._booked_bytes[share.device]

    # --- devices -----------------------------------------------------------------------------------

    def add_device(
        self,
        number: int,
        name: str,
        memory_bytes: int,
        kind: str = "",
        node: str = "",
        context_bytes: int = 0,
        *,
        elastic: bool = False,
    ) -> None:
        """Add a device, or note that it is back: it keeps its shares."""
        self.devices[number] = Device(
            number, name, memory_bytes, kind, node, elastic, context_bytes
        )

    def absent(self, number: int) -> None:
        """Note that its node is silent. New leases do not get the device until it returns."""
        if number in self.devices:
            self.devices[number].present = False

    def remove_device(self, number: int) -> list[Lost]:
        """Remove a device and its sessions. Leases keep their other devices."""
        self.devices.pop(number, None)
        return self.lose(self.shares_of(number))

    def booked_bytes(self, number: int) -> int:
        return self._booked_bytes.get(number, 0)

    def sessions(self, number: int) -> int:
        """Return how many sessions the device has."""
        return len(self._by_device.get(number, ()))

    def shares_of(self, number: int) -> list[Share]:
        return list(self._by_device.get(number, {}).values())

    def free_bytes(self, number: int, key: str = "") -> int:
        """Return what one more session could have: nobody holds it, or has reserved it under another
        key."""
        device = self.devices[number]
        reserved = self.reserved_bytes(number) - self._reserved.get(key, {}).get(number, 0)
        contexts = device.context_bytes * self.sessions(number)
        return max(0, device.memory_bytes - self.booked_bytes(number) - reserved - contexts)

    def offers(self, key: str = "") -> list[Offer]:
        """Return every present device, and the memory that is free for a request with this key."""
        return [
            Offer(
                d.number, d.name, d.node, d.kind, d.memory_bytes,
                self.free_bytes(d.number, key), self.sessions(d.number), d.elastic,
            )
            for d in self.devices.values()
            if d.present
        ]  # fmt: skip

    # --- reservations ------------------------------------------------------------------------------

    def reserve(self, key: str, shares_bytes: dict[int, int]) -> bool:
        """Keep memory of devices for requests with `key`, instead of what it had. Return False, and
        change nothing, if a device is not there or does not have it."""
        if any(
            number not in self.devices or amount > self.free_bytes(number, key)
            for number, amount in shares_bytes.items()
        ):
            return False
        self._reserved[key] = dict(shares_bytes)
        return True

    def unreserve(self, key: str) -> None:
        self._reserved.pop(key, None)

    def reserved_bytes(self, number: int) -> int:
        return sum(shares.get(number, 0) for shares in self._reserved.values())

    # --- leases ------------------------------------------------------------------------------------

    def grant(self, request: Request) -> Granted:
        """Return a lease for `request`. A refusal changes nothing."""
        chosen = self._choose(request)
        quota = self.quotas.get(request.accountable)
        if quota is not None and quota.memory_bytes is not None:  # what it may use is what it books
            chosen = [replace(offer, elastic=False) for offer in chosen]
        shares_bytes = [offer.share_bytes(request.needs) for offer in chosen]
        no_amount = request.needs.asks_no_amount
        if no_amount:  # "what there is for me"
            most_bytes = self._quota_left_bytes(request.accountable) // request.count
            shares_bytes = [max(1, min(amount, most_bytes)) for amount in shares_bytes]
        self._check_quota(request.accountable, len(chosen), sum(shares_bytes))
        session = self._session(request.avoid)
        self.epoch += 1
        shares = tuple(
            Share(
                offer.number,
                session,
                amount,
                offer.memory_bytes if no_amount and offer.elastic else 0,
            )
            for offer, amount in zip(chosen, shares_bytes, strict=True)
        )
        granted = Granted(
            self.epoch, self.epoch, shares, request.client, request.until, request.owner
        )
        self._put(granted)
        return granted

    def set_aside(self, lease: int) -> None:
        """Note that a lease is suspended: its memory is the host's, and free for others."""
        granted = self.leases.get(lease)
        if granted is not None and lease not in self._aside:
            for share in granted.shares:
                self._booked_bytes[share.device] -= share.memory_bytes
            self._aside.add(lease)

    def take_back(self, lease: int) -> bool:
        """Book the memory of a suspended lease again. Return False if it is not free."""
        granted = self.leases.get(lease)
        if granted is None or lease not in self._aside:
            return granted is not None
        if any(
            s.device not in self.devices or s.memory_bytes > self.free_bytes(s.device)
            for s in granted.shares
        ):
            return False
        for share in granted.shares:
            self._booked_bytes[share.device] += share.memory_bytes
        self._aside.discard(lease)
        return True

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
        return self._remove(lease)

    def restore(self, granted: Iterable[Granted], epoch: int, next_session: int) -> None:
        """Take over the leases of an earlier head."""
        for lease in list(self.leases):
            self._remove(lease)
        for one in granted:
            self._put(one)
        self.epoch = max([epoch, *(g.epoch for g in self.leases.values())])
        self.next_session = next_session

    def expired(self, now: float) -> list[int]:
        """Return the leases whose time is over."""
        return [g.lease for g in self.leases.values() if g.until is not None and g.until <= now]

    def held_by(self, client: str) -> list[Granted]:
        return list(self._by_client.get(client, {}).values())

    def owned_by(self, owner: str) -> list[Granted]:
        """Return the leases that count for this owner's quota."""
        return list(self._by_owner.get(owner, {}).values())

    # --- what was lost -----------------------------------------------------------------------------

    def session_ended(self, device: int, session: int, epoch: int) -> list[Lost]:
        """Note that the worker of this session and epoch is gone, as its device server reports."""
        share = self._by_device.get(device, {}).get(session)
        if share is None or self.leases[self._by_session[session]].epoch != epoch:
            return []
        return self.lose([share])

    def reconcile(self, devices: set[int], held: Iterable[Held]) -> tuple[list[Held], list[Lost]]:
        """Take in a node that is back with `devices`, whose servers hold `held`.

        Returns what they must revoke (late holders: the lease has ended here, or is another one by
        now) and what leases have lost (no worker holds it any more).
        """
        known = {self._held(share): share for device in devices for share in self.shares_of(device)}
        there = set(held)
        lost = self.lose(share for one, share in known.items() if one not in there)
        return sorted(there - known.keys(), key=lambda h: (h.device, h.session)), lost

    def _held(self, share: Share) -> Held:
        granted = self.leases[self._by_session[share.session]]
        return Held(share.device, share.session, granted.lease, granted.epoch)

    def lose(self, shares: Iterable[Share]) -> list[Lost]:
        """Remove shares from the leases that have them."""
        by_lease: dict[int, set[Share]] = {}
        for share in shares:
            if self._by_device.get(share.device, {}).get(share.session) == share:
                by_lease.setdefault(self._by_session[share.session], set()).add(share)
        found = []
        for lease in sorted(by_lease):
            granted, gone = self.leases[lease], by_lease[lease]
            kept = tuple(s for s in granted.shares if s not in gone)
            if kept:
                self._put(replace(granted, shares=kept))
            else:
                self._remove(lease)
            lost = tuple(s for s in granted.shares if s in gone)
            found.append(Lost(lease, lost, ended=not kept))
        return found

    # --- refusals ----------------------------------------------------------------------------------

    def _choose(self, request: Request) -> list[Offer]:
        """Choose devices. A refusal also names what the client's quota forbids."""
        silent = [d.name for d in self.devices.values() if not d.present]
        try:
            return choose(request, self.offers(request.reservation), silent)
        except LeaseRefused as refused:
            asked_bytes = max(0, request.memory_bytes or 0) * max(0, request.count)
            over = self._over_quota(request.accountable, request.count, asked_bytes)
            if over is not None:
                refused.reasons += over.reasons
                refused.unblock += over.unblock
            raise

    def refusal(self, request: Request) -> LeaseRefused | None:
        """Return why a request would be refused now; None: the devices and its quota allow it."""
        try:
            self._choose(request)
            self.check_quota(request)
        except LeaseRefused as refused:
            return refused
        return None

    def could_ever(self, request: Request) -> bool:
        """Return whether the present devices could hold a request, were they empty."""
        empty = [replace(o, free_bytes=o.memory_bytes, sessions=0) for o in self.offers()]
        try:
            choose(request, empty)
        except LeaseRefused:
            return False
        return True

    def check_quota(self, request: Request) -> None:
        """Raise LeaseRefused if a request is over its owner's quota."""
        wanted_bytes = max(0, request.memory_bytes or 0) * request.count
        self._check_quota(request.accountable, request.count, wanted_bytes)

    def _check_quota(self, owner: str, count: int, memory_bytes: int) -> None:
        over = self._over_quota(owner, count, memory_bytes)
        if over is not None:
            raise over

    def _over_quota(self, owner: str, count: int, memory_bytes: int) -> LeaseRefused | None:
        quota = self.quotas.get(owner)
        if quota is None:
            return None
        shares = [s for g in self.owned_by(owner) for s in g.shares if g.lease not in self._aside]
        devices = len(shares) + count
        total = sum(s.memory_bytes for s in shares) + memory_bytes
        reasons = []
        if quota.devices is not None and devices > quota.devices:
            reasons.append(
                f"{owner} may hold {quota.devices} device(s) at once and would hold {devices}"
            )
        if quota.memory_bytes is not None and total > quota.memory_bytes:
            reasons.append(
                f"{owner} may hold {show_bytes(quota.memory_bytes)} at once and would hold "
                f"{show_bytes(total)}"
            )
        if not reasons:
            return None
        unblock = ["the end of another program of yours"] if shares else []
        unblock += ["asking for less", "a larger quota: the pool's owner gives it with a new code"]
        return LeaseRefused(f"the quota of {owner} does not allow this.", reasons, unblock)

    def _quota_left_bytes(self, owner: str) -> int:
        quota = self.quotas.get(owner)
        if quota is None or quota.memory_bytes is None:
            return 2**63
        held = sum(s.memory_bytes for g in self.owned_by(owner) for s in g.shares)
        return max(0, quota.memory_bytes - held)

    def _session(self, avoid: frozenset[int]) -> int:
        """Return the next free number, in a circle: one that was just given back comes last."""
        circle = ((self.next_session - 1 + i) % SESSIONS_MAX + 1 for i in range(SESSIONS_MAX))
        found = next((n for n in circle if n not in self._by_session and n not in avoid), None)
        if found is None:
            raise LeaseRefused(f"all {SESSIONS_MAX} session numbers of the pool are in use")
        self.next_session = found % SESSIONS_MAX + 1
        return found
