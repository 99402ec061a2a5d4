"""Who holds which devices: a pure table. Requests in, grants out; no clock, socket or randomness."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from shoal.pool.base.limits import SESSIONS_MAX
from shoal.pool.head.placement import LeaseRefused, Request, check, choose
from shoal.pool.head.table.offered import Offered
from shoal.pool.head.table.owned import Owned, Quotas
from shoal.pool.head.table.parts import Device, Granted, Held, Lost, Share
from shoal.tasks.offer_index import OfferIndex
from shoal.tasks.room import Offer

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
class LeaseTable:
    """Invariants: on a node, a session number belongs to at most one lease, whose devices all share it
    (they are one address space); the shares of a device are never more than its memory (a lease that
    asked for no amount got what was free); an owner with a quota never holds more than that; epochs
    only grow. Memory that is reserved under a key is not free for requests with another.

    Only `_put` and `_remove` change the leases, and the indices with them. No grant looks at all
    devices or all leases.
    """

    devices: dict[int, Device] = field(default_factory=dict)
    leases: dict[int, Granted] = field(default_factory=dict, init=False)
    quotas: Quotas = field(default_factory=Quotas)
    epoch: int = 0
    next_session: int = 1
    _by_device: dict[int, dict[int, Share]] = field(default_factory=dict, init=False)  # by session
    _booked_bytes: dict[int, int] = field(default_factory=dict, init=False)  # by device
    _by_client: dict[str, dict[int, Granted]] = field(default_factory=dict, init=False)  # by lease
    _by_owner: dict[str, dict[int, Granted]] = field(default_factory=dict, init=False)  # by lease
    _by_part: dict[tuple[int, int], int] = field(default_factory=dict, init=False)  # the lease
    _owned: Owned = field(default_factory=Owned, init=False)
    _on_node: dict[str, set[int]] = field(default_factory=dict, init=False)  # device numbers
    _reserved: dict[str, dict[int, int]] = field(
        default_factory=dict, init=False
    )  # key: device: bytes
    _reserved_bytes: dict[int, int] = field(default_factory=dict, init=False)  # by device
    offered: Offered = field(default_factory=Offered, init=False, compare=False)
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
            self._by_part[share.part] = granted.lease
            self._by_device.setdefault(share.device, {})[share.session] = share
            booked_bytes = 0 if granted.lease in self._aside else share.memory_bytes
            self._booked_bytes[share.device] = self.booked_bytes(share.device) + booked_bytes
            self.offered.touch(share.device)
        self._owned.count(granted, 1, aside=granted.lease in self._aside)

    def _remove(self, lease: int) -> Granted | None:
        granted = self.leases.pop(lease, None)
        if granted is not None:
            self._forget(granted)
            self.offered.ended.add(lease)
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
        self._owned.count(granted, -1, aside=granted.lease in self._aside)
        for share in granted.shares:
            del self._by_part[share.part]
            on_device = self._by_device[share.device]
            del on_device[share.session]
            if granted.lease not in self._aside:
                self._booked_bytes[share.device] -= share.memory_bytes
            if not on_device:
                del self._by_device[share.device], self._booked_bytes[share.device]
            self.offered.touch(share.device)

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
        self._on_node.setdefault(node, set()).add(number)
        self.offered.presence_changed()
        self.offered.touch(number)
        self.devices[number] = Device(
            number, name, memory_bytes, kind, node, elastic, context_bytes
        )

    def absent(self, number: int) -> None:
        """Note that its node is silent. New leases do not get the device until it returns."""
        if number in self.devices:
            self.devices[number].present = False
            self.offered.presence_changed()
            self.offered.touch(number)

    def remove_device(self, number: int) -> list[Lost]:
        """Remove a device and its sessions. Leases keep their other devices."""
        known = self.devices.pop(number, None)
        if known is not None:
            self.offered.presence_changed()
            self.offered.touch(number)
        lost = self.lose(self.shares_of(number))
        if known is not None:  # nothing is held there any more
            on_node = self._on_node[known.node]
            on_node.discard(number)
            if not on_node:
                del self._on_node[known.node]
        return lost

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

    def offer(self, number: int, key: str = "") -> Offer | None:
        """Return a present device, and the memory that is free for a request with this key."""
        d = self.devices.get(number)
        if d is None or not d.present:
            return None
        return Offer(
            d.number, d.name, d.node, d.kind, d.memory_bytes,
            self.free_bytes(d.number, key), self.sessions(d.number), d.elastic,
        )  # fmt: skip

    def offers(self, key: str = "") -> list[Offer]:
        """Return every present device, and the memory that is free for a request with this key."""
        if key in self._reserved:
            found = [self.offer(number, key) for number in self.devices]
            return [offer for offer in found if offer is not None]
        known = self._index().offers
        return [known[number] for number in self.devices if number in known]

    def _index(self) -> OfferIndex:
        """Return what present devices offer to requests without a reservation."""
        return self.offered.index(self.offer)

    @property
    def silent(self) -> tuple[str, ...]:
        """Return the names of devices whose nodes are silent."""
        return self.offered.silent(self.devices)

    # --- reservations ------------------------------------------------------------------------------

    def reserve(self, key: str, shares_bytes: dict[int, int]) -> bool:
        """Keep memory of devices for requests with `key`, instead of what it had. Return False, and
        change nothing, if a device is not there or does not have it."""
        if any(
            number not in self.devices or amount > self.free_bytes(number, key)
            for number, amount in shares_bytes.items()
        ):
            return False
        self.unreserve(key)
        self._reserved[key] = dict(shares_bytes)
        for number, amount in shares_bytes.items():
            self._reserved_bytes[number] = self.reserved_bytes(number) + amount
            self.offered.touch(number)
        return True

    def unreserve(self, key: str) -> None:
        for number, amount in self._reserved.pop(key, {}).items():
            self._reserved_bytes[number] -= amount
            if not self._reserved_bytes[number]:
                del self._reserved_bytes[number]
            self.offered.touch(number)

    def reserved_bytes(self, number: int) -> int:
        return self._reserved_bytes.get(number, 0)

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
            most_bytes = self._owned.left_bytes(request.accountable, quota) // request.count
            shares_bytes = [max(1, min(amount, most_bytes)) for amount in shares_bytes]
        self._owned.check(request.accountable, quota, len(chosen), sum(shares_bytes))
        session = self._session(request.avoid, {offer.node for offer in chosen})
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
                self.offered.touch(share.device)
            self._aside.add(lease)
            self._owned.count(granted, -1)
            self._owned.count(granted, 1, aside=True)

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
            self.offered.touch(share.device)
        self._aside.discard(lease)
        self._owned.count(granted, -1, aside=True)
        self._owned.count(granted, 1)
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

    def restore(
        self,
        granted: Iterable[Granted],
        epoch: int,
        next_session: int,
        nodes: Mapping[int, str] | None = None,
    ) -> None:
        """Take over the leases of an earlier head.

        Args:
            nodes: the nodes of devices: sessions there keep their numbers while the node is away.
        """
        for lease in list(self.leases):
            self._remove(lease)
        for one in granted:
            self._put(one)
            for share in one.shares:
                node = (nodes or {}).get(share.device)
                if node is not None:
                    self._on_node.setdefault(node, set()).add(share.device)
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
        if share is None or self.leases[self._by_part[share.part]].epoch != epoch:
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
        granted = self.leases[self._by_part[share.part]]
        return Held(share.device, share.session, granted.lease, granted.epoch)

    def lose(self, shares: Iterable[Share]) -> list[Lost]:
        """Remove shares from the leases that have them."""
        by_lease: dict[int, set[Share]] = {}
        for share in shares:
            if self._by_device.get(share.device, {}).get(share.session) == share:
                by_lease.setdefault(self._by_part[share.part], set()).add(share)
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
        try:
            check(request)
            # To refuse, it looks at every device: for the reasons.
            return self._find(request) or choose(
                request, self.offers(request.reservation), self.silent
            )
        except LeaseRefused as refused:
            asked_bytes = max(0, request.memory_bytes or 0) * max(0, request.count)
            owner = request.accountable
            over = self._owned.over(owner, self.quotas.get(owner), request.count, asked_bytes)
            if over is not None:
                refused.reasons += over.reasons
                refused.unblock += over.unblock
            raise

    def _find(self, request: Request) -> list[Offer]:
        """Return devices for a request, or none if there are too few."""
        key = request.reservation
        if key not in self._reserved:
            return self._index().choose(request.needs)
        numbers = self.devices if request.only is None else request.only
        found = (self.offer(number, key) for number in numbers)
        return OfferIndex(offer for offer in found if offer is not None).choose(request.needs)

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
        try:
            check(request)
        except LeaseRefused:
            return False
        return self._index().could_ever(request.needs)

    def check_quota(self, request: Request) -> None:
        """Raise LeaseRefused if a request is over its owner's quota."""
        wanted_bytes = max(0, request.memory_bytes or 0) * request.count
        owner = request.accountable
        self._owned.check(owner, self.quotas.get(owner), request.count, wanted_bytes)

    def _session(self, avoid: frozenset[int], nodes: Iterable[str]) -> int:
        """Return the next number that is free on these nodes, in a circle: one that was just given back
        comes last."""
        there = [
            on_device
            for node in nodes
            for number in self._on_node[node]
            if (on_device := self._by_device.get(number)) is not None
        ]
        circle = ((self.next_session - 1 + i) % SESSIONS_MAX + 1 for i in range(SESSIONS_MAX))
        found = next((n for n in circle if n not in avoid and not any(n in d for d in there)), None)
        if found is None:
            raise LeaseRefused(f"all {SESSIONS_MAX} session numbers of a node are in use")
        self.next_session = found % SESSIONS_MAX + 1
        return found
