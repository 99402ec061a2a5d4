"""What an event's result opens: devices that are kept for its winners, for the time that was promised.

    granted ──member──▶ waiting ──admission──▶ open ──its minutes──▶ over
       └─────guest──▶ join ──its code──┘

A grant waits in admission like a lease. Its minutes begin when it has its devices. From then on they
are reserved, and the holder's leases come out of the reservation, as often as the holder likes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from shoal.people.event import Event, Outcome
from shoal.pool.access.codes import Quota
from shoal.pool.base import limits
from shoal.pool.base.clock import Clock
from shoal.pool.head.admitting import Admitting
from shoal.pool.head.leases import Granted, LeaseTable, Request
from shoal.pool.head.people.event_store import Grant, Kept
from shoal.pool.wire import messages
from shoal.pool.wire import people_messages as people
from shoal.tasks.requests import Ask
from shoal.tasks.room import Needs, is_of_kind


@dataclass(slots=True)
class _Live:
    """A grant that is not over."""

    event: str
    name: str  # the entrant's
    holder: str
    needs: Needs
    seconds: float
    until: float | None = None  # None: it waits for devices
    shares: dict[int, int] = field(default_factory=dict)  # bytes by device
    leases: dict[int, Granted] = field(default_factory=dict)
    whole: bool = False  # all that is not leased is reserved

    @property
    def request(self) -> str:
        """The name in admission, and the key of the reservation."""
        return f"event-{self.event}-{self.name}"

    def left_bytes(self) -> dict[int, int]:
        """Return what no lease of it has, by device."""
        left = dict(self.shares)
        for granted in self.leases.values():
            for share in granted.shares:
                left[share.device] = left.get(share.device, 0) - share.memory_bytes
        return {number: amount for number, amount in left.items() if amount > 0}


class EventGrants:
    """Args:
    is_member: whether the pool knows this name.
    is_revoked: whether the name is of a member who may not use the pool any more.
    end_lease: ends a lease whose grant is over.
    """

    def __init__(
        self,
        table: LeaseTable,
        admitting: Admitting,
        clock: Clock,
        is_member: Callable[[str], bool],
        is_revoked: Callable[[str], bool],
        end_lease: Callable[[int], None],
    ) -> None:
        self._table = table
        self._admitting = admitting
        self._clock = clock
        self._is_member = is_member
        self._is_revoked = is_revoked
        self._end_lease = end_lease
        self._live: dict[str, _Live] = {}  # by request
        self._of: dict[str, list[_Live]] = {}  # by holder
        self._began: dict[str, list[_Live]] = {}  # not on the disk yet, by event
        self._leases: dict[int, _Live] = {}
        self._own_quota: dict[str, Quota | None] = {}  # of holders of open grants

    def free_name(self, wished: str, taken: Container[str]) -> str:
        """Return a name for a guest that nobody has."""
        base = re.sub(r"[^a-z0-9]+", "-", wished.lower()).strip("-")[:24].strip("-") or "guest"
        number = 1
        while True:
            name = base if number == 1 else f"{base}-{number}"
            if name not in taken and not self._is_member(name) and name not in ("owner", "head"):
                return name
            number += 1

    def holders(self, event: Event) -> frozenset[str]:
        """Return who of an event's requests holds a grant already."""
        return frozenset(event.requests.keys() & self._of.keys())

    def open(self, kept: Kept, granted: Iterable[Outcome]) -> None:
        """Note who holds the grants of members. A guest's is held by who joins with its code."""
        for outcome in granted:
            if kept.event.entrants[outcome.name].member:
                kept.grants[outcome.name] = Grant(outcome.name)

    # --- from the result to the devices ------------------------------------------------------------

    def take_effect(self, kept: Kept) -> None:
        """Let the grants of an event wait for devices, or go on with those of an earlier head."""
        settings, now = kept.event.settings, self._clock.now()
        for name, grant in kept.grants.items():
            over = grant.until is not None and grant.until <= now
            if over or self._is_revoked(grant.holder):
                continue
            live = _Live(
                settings.event, name, grant.holder, Needs(settings.devices, settings.memory_bytes),
                kept.event.requests[name].minutes * 60, grant.until, dict(grant.shares),
            )  # fmt: skip
            if live.request in self._live:
                continue
            self._live[live.request] = live
            self._of.setdefault(live.holder, []).append(live)
            # Nobody's quota stands against what an event has promised.
            ask = Ask(
                live.request, f"event {live.event}", live.needs, limit_s=live.seconds,
                asked=kept.event.requests[name].asked_at,
            )  # fmt: skip
            if live.until is None:
                self._admitting.add(ask, partial(self._book, live), lambda: None)
            else:
                self._go_on(live, ask)

    def _book(self, live: _Live, devices: tuple[int, ...]) -> Mapping[int, int] | None:
        """Reserve devices for a grant that was admitted. Its time begins."""
        offers = [self._table.offer(number) for number in devices]
        shares = {o.number: o.share_bytes(live.needs) for o in offers if o is not None}
        if len(shares) < len(devices) or not all(shares.values()):
            return None
        if not self._table.reserve(live.request, shares):
            return None
        live.shares, live.whole = shares, True
        live.until = self._clock.now() + live.seconds
        self._opened(live)
        self._began.setdefault(live.event, []).append(live)
        return shares

    def _go_on(self, live: _Live, ask: Ask) -> None:
        """Take over a grant that an earlier head has opened, with its leases."""
        for granted in self._table.owned_by(live.holder):
            mine = all(share.device in live.shares for share in granted.shares)
            if granted.until is not None and granted.until <= (live.until or 0.0) and mine:
                live.leases[granted.lease] = granted
                self._leases[granted.lease] = live
        self._opened(live)
        self._admitting.adopt(ask, live.shares)
        self._reserve(live)

    def _opened(self, live: _Live) -> None:
        self._own_quota.setdefault(live.holder, self._table.quotas.get(live.holder))
        self._set_quota(live.holder)
        self._admitting.admission.uses.hold(live.holder, len(live.shares), self._clock.now())

    def _set_quota(self, holder: str) -> None:
        """Let a grant come on top of the holder's own quota."""
        own = self._own_quota[holder]
        if own is None:
            return
        for live in self._of.get(holder, ()):
            if live.until is not None:
                own = _more(own, live.needs)
        self._table.quotas[holder] = own

    def _reserve(self, live: _Live) -> None:
        """Keep what no lease of a grant has. Devices that are away are kept when they are back."""
        left = live.left_bytes()
        there = {number: amount for number, amount in left.items() if number in self._table.devices}
        live.whole = self._table.reserve(live.request, there) and len(there) == len(left)

    def keep(self) -> None:
        """Reserve what has come back: before others look for devices."""
        for live in self._live.values():
            if live.until is not None and not live.whole:
                self._reserve(live)

    def unsaved(self, event: str) -> dict[str, Grant]:
        """Return the grants of an event that began and are not on the disk, by entrant."""
        return {
            live.name: Grant(live.holder, live.until, dict(live.shares))
            for live in self._began.get(event, ())
        }

    def saved(self, event: str, names: Container[str]) -> None:
        left = [live for live in self._began.pop(event, []) if live.name not in names]
        if left:
            self._began[event] = left

    # --- leases ------------------------------------------------------------------------------------

    def lease(self, request: Request, ask: messages.AskLease) -> Granted | None:
        """Grant a lease out of what is kept for its client. None: nothing, or not enough.

        A request that names no number of devices, or no memory, gets all that the grant has.
        """
        now = self._clock.now()
        for live in self._of.get(request.accountable, ()):
            if live.until is not None and live.until > now:
                wanted = self._within(live, request, ask, now)
                granted = self._table.grant(wanted) if wanted is not None else None
                if granted is not None:
                    live.leases[granted.lease] = granted
                    self._leases[granted.lease] = live
                    self._reserve(live)
                    return granted
        return None

    def _within(
        self, live: _Live, request: Request, ask: messages.AskLease, now: float
    ) -> Request | None:
        """Return a request for devices of a grant; None if it has too few."""
        assert live.until is not None
        left = live.left_bytes()
        wanted = replace(request, count=ask.devices or len(left), reservation=live.request)
        if request.memory_bytes is None and request.fraction is None:
            wanted = replace(wanted, memory_bytes=live.needs.memory_bytes)
        enough = set()
        for number, amount in left.items():
            offer = self._table.offer(number, live.request)
            if offer is None or not is_of_kind(offer.kind, request.kind):
                continue
            if replace(offer, free_bytes=min(amount, offer.free_bytes)).share_bytes(wanted.needs):
                enough.add(number)
        if not 1 <= wanted.count <= len(enough):
            return None
        until = live.until if ask.duration_s is None else min(live.until, now + ask.duration_s)
        wanted = replace(wanted, only=frozenset(enough), until=until)
        return wanted if self._table.refusal(wanted) is None else None

    def lease_ended(self, lease: int) -> None:
        """Keep again what a lease gives back."""
        live = self._leases.pop(lease, None)
        if live is not None:
            live.leases.pop(lease, None)
            if live.request in self._live:
                self._reserve(live)

    # --- the end -----------------------------------------------------------------------------------

    def expire(self, now: float) -> list[str]:
        """End grants that are over, with their leases. Return their events."""
        over = [one for one in self._live.values() if one.until is not None and one.until <= now]
        for live in over:
            self._end(live)
            self._own_quota_again(live.holder)
        return [live.event for live in over]

    def _end(self, live: _Live) -> None:
        del self._live[live.request]
        self._of[live.holder].remove(live)
        if not self._of[live.holder]:
            del self._of[live.holder]
        for lease in list(live.leases):
            self._end_lease(lease)
        self._table.unreserve(live.request)
        if live.until is None:
            self._admitting.withdraw(live.request)
            return
        self._admitting.ended(live.request)
        now = self._clock.now()
        self._admitting.admission.uses.hold(live.holder, -len(live.shares), now)

    def _own_quota_again(self, holder: str) -> None:
        """Let the holder's other quota hold, and end leases above it."""
        self._set_quota(holder)
        if any(other.until is not None for other in self._of.get(holder, ())):
            return
        own = self._own_quota.pop(holder)
        if own is None:
            return
        held = sorted(self._table.owned_by(holder), key=lambda g: g.lease)
        while held and _exceeds(own, held):
            self._end_lease(held.pop().lease)

    def forget(self, name: str) -> None:
        """A member was revoked: what was kept for it is free."""
        for live in list(self._of.get(name, ())):
            self._end(live)
        own = self._own_quota.pop(name, None)
        if own is not None:
            self._table.quotas[name] = own

    # --- what people see ---------------------------------------------------------------------------

    def state(self, kept: Kept, name: str) -> people.GrantState | None:
        """Return how far the grant of an entrant is; None: it has none."""
        outcome, grant = kept.event.outcomes.get(name), kept.grants.get(name)
        if outcome is None or outcome.ended != "granted":
            return None
        if grant is None:
            return "join"
        if grant.until is None:
            return "over" if self._is_revoked(grant.holder) else "waiting"
        return "open" if grant.until > self._clock.now() else "over"

    def info(self, kept: Kept, name: str) -> people.GrantInfo | None:
        """Return what an entrant has of the pool, with the reasons while it waits."""
        state, grant = self.state(kept, name), kept.grants.get(name, Grant(""))
        if state is None:
            return None
        request = f"event-{kept.event.settings.event}-{name}"
        reasons = []
        if state == "waiting" and self._admitting.waits(request):
            reasons = [
                r.text[: limits.TEXT_CHARS_MAX] for r in self._admitting.reasons(request)[:16]
            ]
        devices = self._table.devices
        names = [devices[n].name if n in devices else f"device {n}" for n in sorted(grant.shares)]
        return people.GrantInfo(state, grant.holder, names, grant.until, reasons)


def _more(own: Quota, needs: Needs) -> Quota:
    """Return a quota with so much more; what is not limited stays so."""
    most = None if own.devices is None else own.devices + needs.devices
    if own.memory_bytes is None or needs.memory_bytes is None:
        return Quota(most, None)
    return Quota(most, own.memory_bytes + needs.devices * needs.memory_bytes)


def _exceeds(own: Quota, held: Iterable[Granted]) -> bool:
    shares = [share for granted in held for share in granted.shares]
    if own.devices is not None and len(shares) > own.devices:
        return True
    return own.memory_bytes is not None and sum(s.memory_bytes for s in shares) > own.memory_bytes
