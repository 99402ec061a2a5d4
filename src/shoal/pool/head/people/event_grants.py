"""What an event's result opens: more quota for a member, for a while; a join code for a guest."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable
from dataclasses import replace

from shoal.people.event import Event, Outcome
from shoal.pool.access.codes import Quota
from shoal.pool.base.clock import Clock
from shoal.pool.head.leases import LeaseTable
from shoal.pool.head.people.event_store import Kept


class EventGrants:
    """Args:
    is_member: whether the pool knows this name.
    end_lease: ends a lease whose grant is over.
    """

    def __init__(
        self,
        table: LeaseTable,
        clock: Clock,
        is_member: Callable[[str], bool],
        end_lease: Callable[[int], None],
    ) -> None:
        self._table = table
        self._clock = clock
        self._is_member = is_member
        self._end_lease = end_lease
        self._own_quota: dict[str, Quota | None] = {}  # of members whose grant holds now
        self._until: dict[str, float] = {}

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
        return frozenset(event.requests.keys() & self._until.keys())

    def open(self, kept: Kept, granted: Iterable[Outcome]) -> None:
        """Note until when each member's grant holds. Guests get a join code when they look."""
        now = self._clock.now()
        for outcome in granted:
            entrant = kept.event.entrants[outcome.name]
            if entrant.member:
                kept.until[outcome.name] = now + kept.event.settings.minutes * 60

    def take_effect(self, kept: Kept) -> None:
        """Raise the quotas of the members that an event granted a place."""
        settings = kept.event.settings
        now = self._clock.now()
        for name, until in kept.until.items():
            if until <= now:
                continue
            own = self._own_quota.setdefault(name, self._table.quotas.get(name))
            self._until[name] = max(until, self._until.get(name, 0.0))
            if own is not None:
                self._table.quotas[name] = _at_least(own, settings.devices, settings.memory_bytes)

    def expire(self, now: float) -> None:
        """End grants that are over, with the leases that only they allowed."""
        for name in [n for n, until in self._until.items() if until <= now]:
            del self._until[name]
            own = self._own_quota.pop(name)
            if own is None:
                continue
            self._table.quotas[name] = own
            held = sorted(self._table.held_by(name), key=lambda g: g.lease)
            while held and _exceeds(own, held):
                self._end_lease(held.pop().lease)

    def forget(self, name: str) -> None:
        """A member was revoked."""
        self._until.pop(name, None)
        self._own_quota.pop(name, None)


def _at_least(own: Quota, devices: int, memory_bytes: int | None) -> Quota:
    """Return a quota with at least this much; what is not limited stays so."""
    most = None if own.devices is None else max(own.devices, devices)
    if own.memory_bytes is None:
        return replace(own, devices=most)
    memory = None if memory_bytes is None else max(own.memory_bytes, memory_bytes)
    return replace(own, devices=most, memory_bytes=memory)


def _exceeds(own: Quota, held: Iterable[object]) -> bool:
    shares = [share for granted in held for share in granted.shares]  # type: ignore[attr-defined]
    if own.devices is not None and len(shares) > own.devices:
        return True
    return own.memory_bytes is not None and sum(s.memory_bytes for s in shares) > own.memory_bytes
