"""Admission: which requests may have devices, and in which order. A pure state machine.

    >>> admission = Admission(find("first-come"))
    >>> device = Offer(0, "gpu-0", "node", "a100", 100, 100, 0)
    >>> admission.step(Capacity((device,)), 0.0)
    []
    >>> admission.step(Asked(Ask("lease-1", "ana", Needs(memory_bytes=60))), 1.0)
    [Admit(request='lease-1', devices=(0,))]

Invariants: a request is in `waiting` or in `holdings`, never in both, and leaves for good once; what
is held and admitted stays within every quota; no request is admitted before one that is equal and came
earlier.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace

from shoal.tasks.backfill import Base, Room
from shoal.tasks.line import Lines, Shape
from shoal.tasks.reasons import Code, Reason
from shoal.tasks.requests import (
    Admit,
    Ask,
    Asked,
    Capacity,
    Ended,
    Expire,
    Granted,
    Held,
    Holding,
    Input,
    NotGranted,
    Output,
    Planned,
    Planning,
    Quota,
    Released,
    Returned,
    Tick,
    Waiting,
    Withdrawn,
)  # fmt: skip
from shoal.tasks.room import Needs, Offer, suitable
from shoal.tasks.rules import find
from shoal.tasks.rules.rule import Rule
from shoal.tasks.use import Uses

__all__ = ["Admission", "Admit", "Ask", "Asked", "Capacity", "Needs", "Offer", "find"]

#: As many requests that do not fit keep devices free. Those behind them wait.
KEEPING_MAX = 64
#: Beyond so many different needs, nobody looks at each of them first.
NEEDS_LOOKED_AT_MAX = 64
#: A request that was admitted and did not get its devices tries again after this.
AGAIN_S = 1.0


class Admission:
    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.offers: dict[int, Offer] = {}
        self.missing: tuple[str, ...] = ()  # devices of silent nodes
        self.quotas: dict[str, Quota] = {}
        self.waiting: dict[str, Waiting] = {}
        self.holdings: dict[str, Holding] = {}
        self.uses = Uses()
        self.planning = Planning(0.0)
        self._held_devices: dict[str, int] = {}  # by owner
        self._held_bytes: dict[str, int] = {}
        self._lines = Lines()
        self._needs: Counter[Needs] = Counter()  # of what waits
        self._held_back = 0  # waiting requests that are held
        self._unplanned: dict[str, Waiting] = {}  # what waits and is not left to a planner
        self._next = 0
        self._base: Base | None = None  # of offers and holdings; made when it is first needed

    def copy(self) -> Admission:
        """Return a copy to look ahead with, by the rule alone. It shares nothing that changes."""
        made = Admission(self.rule)
        made.offers, made.missing, made.quotas = dict(self.offers), self.missing, dict(self.quotas)
        made.waiting, made.holdings = dict(self.waiting), dict(self.holdings)
        made.uses = self.uses.copy()
        made._held_devices, made._held_bytes = dict(self._held_devices), dict(self._held_bytes)
        made._lines = self._lines.copy()
        made._needs, made._held_back = self._needs.copy(), self._held_back
        made._unplanned = dict(self._unplanned)
        made._next = self._next
        return made

    # --- inputs ------------------------------------------------------------------------------------

    def step(self, event: Input, now: float) -> list[Output]:
        """Take in what has happened. Return what follows."""
        match event:
            case Asked():
                return self._decide(now) if self._ask(event, now) else []
            case Granted():
                self._grant(event, now)
                return []
            case Held(request, reason):
                if request in self.waiting:
                    holds = {**self.waiting[request].holds, reason.code: reason}
                    self._set_holds(request, holds)
            case Released(request, code):
                if request in self.waiting:
                    holds = {c: r for c, r in self.waiting[request].holds.items() if c is not code}
                    self._set_holds(request, holds)
            case Withdrawn(request):
                self.drop(request)
                self._let_go(request, now)
            case Ended(request):
                self._let_go(request, now)
            case Returned(ask):
                self._let_go(ask.request, now)
                self._line_up(ask, (), now)
            case NotGranted(request):
                self._take_back(request, now)
            case Capacity():
                if not self._set_capacity(event):
                    return []
            case Quota():
                self._set_quota(event)
            case Planned():
                return self._carry_out(event, now)
            case Planning():
                self.planning = event
            case Tick():
                return self._expire(now) + self._decide(now)
        return self._decide(now)

    def _ask(self, event: Asked, now: float) -> bool:
        """Note a new request. Return whether it could have devices at once."""
        ask = event.ask
        assert ask.request not in self.waiting
        assert ask.request not in self.holdings
        self._line_up(ask, event.holds, now)
        return not event.holds and self.fits_now(ask, now)

    def _line_up(self, ask: Ask, holds: Iterable[Reason], now: float) -> None:
        asked = now if ask.asked is None else min(ask.asked, now)
        self._next += 1
        by_code = {reason.code: reason for reason in holds}
        self._queue(Waiting(ask, asked, self._next, self.rule.key(ask, asked), by_code))

    def fits_now(self, ask: Ask, now: float) -> bool:
        """Return whether there is room for a request, whoever else waits."""
        return bool(self.room(now).choose(ask))

    def _grant(self, event: Granted, now: float) -> None:
        self.drop(event.request)
        before = self.holdings.get(event.request)
        if before is not None:
            self._count(before, -1, now)
        ask = event.ask or (before.ask if before is not None else Ask(event.request, ""))
        shares = dict(event.shares_bytes)
        self._hold(Holding(ask, now, shares, event.until), now)
        for number, amount in shares.items():  # until Capacity says how it really is
            offer = self.offers.get(number)
            if offer is not None:
                free = max(0, offer.free_bytes - amount)
                self._set_offer(
                    number, replace(offer, free_bytes=free, sessions=offer.sessions + 1)
                )

    def _take_back(self, request: str, now: float) -> None:
        holding = self.holdings.get(request)
        if holding is not None and holding.waiting is not None and not holding.confirmed:
            self._let_go(request, now)
            self._queue(replace(holding.waiting, not_before=now + AGAIN_S))

    def _set_capacity(self, event: Capacity) -> bool:
        """Return whether there may be more room than before."""
        more = False
        for number in event.gone:
            self._set_offer(number, None)
        for offer in event.offers:
            before = self.offers.get(offer.number)
            more |= before is None or offer.free_bytes > before.free_bytes
            self._set_offer(offer.number, offer)
        if event.missing is not None:
            self.missing = event.missing
        return more

    def _expire(self, now: float) -> list[Output]:
        over = [
            r for r, w in self.waiting.items() if w.ask.until is not None and w.ask.until <= now
        ]
        for request in over:
            self.drop(request)
        return [Expire(request) for request in over]

    # --- the line ----------------------------------------------------------------------------------

    def _queue(self, waiting: Waiting) -> None:
        self.waiting[waiting.ask.request] = waiting
        if not waiting.ask.by_plan:
            self._unplanned[waiting.ask.request] = waiting
        self._needs[waiting.ask.needs] += 1
        self._held_back += bool(waiting.holds)
        self._lines.add(waiting, self._shape(waiting))

    def drop(self, request: str) -> Waiting | None:
        """Take a request out of the line, without deciding what follows."""
        waiting = self.waiting.pop(request, None)
        self._unplanned.pop(request, None)
        if waiting is not None:
            self._held_back -= bool(waiting.holds)
            self._needs[waiting.ask.needs] -= 1
            if not self._needs[waiting.ask.needs]:
                del self._needs[waiting.ask.needs]
            self._lines.remove(waiting)
        return waiting

    def _shape(self, waiting: Waiting) -> Shape:
        quota = self.quotas.get(waiting.ask.owner)
        limited = quota is not None and (quota.devices, quota.memory_bytes) != (None, None)
        return Shape.of(waiting, self.rule.by_owner or limited)

    def _set_quota(self, quota: Quota) -> None:
        self.quotas[quota.owner] = quota
        self.uses.weights[quota.owner] = quota.weight
        for waiting in [w for w in self.waiting.values() if w.ask.owner == quota.owner]:
            self._lines.remove(waiting)  # its shape may be another now
            self._lines.add(waiting, self._shape(waiting))

    def _set_holds(self, request: str, holds: Mapping[Code, Reason]) -> None:
        waiting = self.drop(request)
        assert waiting is not None
        self._queue(replace(waiting, holds=holds))

    def change(self, request: str, ask: Ask) -> None:
        """Give a waiting request other needs; it keeps its time of asking."""
        waiting = self.drop(request)
        assert waiting is not None
        key = self.rule.key(ask, waiting.asked)
        self._queue(replace(waiting, ask=ask, key=key, not_before=0.0))

    def suppose(self, ask: Ask, holds: Iterable[Reason], now: float) -> None:
        """Queue a request without deciding what follows: in a copy that looks ahead."""
        self._line_up(ask, holds, now)

    def place(self, request: str) -> int | None:
        """Return the place of a waiting request, from 1, where the line says it at once."""
        if self.rule.by_owner or self._held_back:
            return None
        waiting = self.waiting[request]
        return self._lines.ahead_of(waiting) + 1

    def room(self, now: float) -> Room:
        """Return what is free, to look at only."""
        if self._base is None:
            self._base = Base(self.offers, self.holdings.values())
        return Room(self._base, now)

    def _anything_fits(self, room: Room) -> bool:
        """Return whether there may be room for something that waits: a quick look."""
        if len(self._needs) > NEEDS_LOOKED_AT_MAX:
            return True
        return any(room.choose(Ask("", "", needs), kept=False) for needs in self._needs)

    def in_turn(self, now: float, skip: Container[Shape] = ()) -> Iterator[Waiting]:
        """Yield what waits, the next first. Requests may be admitted between two of them.

        Args:
            skip: shapes to leave out; there may be more from one request to the next.
        """
        heads: list[tuple[float, tuple[float, ...], int, Waiting, Shape]] = []

        def push(shape: Shape, waiting: Waiting) -> None:
            turn = self._turn(shape, now)
            heapq.heappush(heads, (turn, waiting.key, waiting.number, waiting, shape))

        for shape, line in self._lines.by_shape.items():
            push(shape, line.entries[0][2])
        while heads:
            turn, key, number, waiting, shape = heapq.heappop(heads)
            if shape in skip:
                continue
            again = self._turn(shape, now)
            if again > turn:  # its owner was admitted something meanwhile
                heapq.heappush(heads, (again, key, number, waiting, shape))
                continue
            yield waiting
            behind = self._lines.by_shape.get(shape)
            following = behind.after(waiting) if behind is not None else None
            if following is not None:
                push(shape, following)

    def _turn(self, shape: Shape, now: float) -> float:
        return self.rule.turn(shape.owner if self.rule.by_owner else "", self.uses, now)

    # --- decisions ---------------------------------------------------------------------------------

    def _decide(self, now: float) -> list[Output]:
        """Admit what may start now."""
        if not self.waiting or not self.offers:
            return []
        planned = self.planning.until > now
        if planned and not self.planning.open and not self._unplanned:
            return []
        room = self.room(now)
        if not self._anything_fits(room):
            return []
        admitted: list[Output] = []
        failed: set[object] = set()
        hopeless: set[Shape] = set()  # in this round, for every request of the shape
        keeping = 0
        for waiting in self.in_turn(now, hopeless):
            ask, shape = waiting.ask, self._lines.shapes[waiting.ask.request]
            if waiting.holds or self.over_quota(ask):
                hopeless.add(shape)
                continue
            if waiting.not_before > now:
                continue
            keeps = now - waiting.asked >= self.rule.patience_s
            left = ask.by_plan and planned  # to the planner
            if left:
                if not self.planning.open or ask.request in self.planning.placed:
                    continue
                ask, keeps = ask.on(self.planning.open), False
            alike = (ask.needs, ask.limit_s, ask.can_suspend)
            chosen = [] if alike in failed else room.choose(ask)
            if chosen and not self._over_memory(ask, chosen):
                taken = {offer.number for offer in chosen}
                self.planning = replace(self.planning, open=self.planning.open - taken)
                admitted.append(self._admit(waiting, chosen, now))
                room.changed(taken)
                if not self._anything_fits(room):
                    break
                continue
            failed.add(alike)
            if keeps and not chosen and self.could_hold(ask.needs):
                keeping += 1
                if keeping > KEEPING_MAX:
                    break
                room.keep_free(ask)
            elif not chosen if left else self._lines.waited_s(shape, now) < self.rule.patience_s:
                hopeless.add(shape)  # and none of them keeps devices free
        return admitted

    def _admit(self, waiting: Waiting, chosen: list[Offer], now: float) -> Admit:
        ask = waiting.ask
        self.drop(ask.request)
        shares = {offer.number: offer.share_bytes(ask.needs) for offer in chosen}
        quota = self.quotas.get(ask.owner)
        if ask.needs.asks_no_amount and quota is not None and quota.memory_bytes is not None:
            left = (quota.memory_bytes - self.held(ask.owner)[1]) // len(chosen)
            shares = {number: min(amount, left) for number, amount in shares.items()}
        self._hold(Holding(ask, now, shares, None, confirmed=False, waiting=waiting), now)
        return Admit(ask.request, tuple(shares))

    def _carry_out(self, plan: Planned, now: float) -> list[Output]:
        """Admit a request where the planner wants it, if quotas and memory allow that."""
        waiting = self.waiting.get(plan.request)
        if waiting is None or waiting.holds or self.over_quota(waiting.ask):
            return []
        room = self.room(now)
        ask = waiting.ask
        self._keep_from_plans(room, now)
        chosen = room.choose(ask.on(frozenset(plan.devices)), beside=True)
        if not chosen or self._over_memory(ask, chosen):
            return []
        return [self._admit(waiting, chosen, now)]

    def _keep_from_plans(self, room: Room, now: float) -> None:
        """Keep devices free for requests that no planner places, once they have waited long."""
        keeping = 0
        for waiting in self._unplanned.values():
            ask = waiting.ask
            patient = now - waiting.asked >= self.rule.patience_s
            if keeping < KEEPING_MAX and patient and not waiting.holds and not room.choose(ask):
                keeping += 1
                room.keep_free(ask)

    # --- what is held ------------------------------------------------------------------------------

    def _hold(self, holding: Holding, now: float) -> None:
        self.holdings[holding.ask.request] = holding
        self._count(holding, 1, now)

    def _let_go(self, request: str, now: float) -> None:
        holding = self.holdings.pop(request, None)
        if holding is not None:
            self._count(holding, -1, now)

    def _count(self, holding: Holding, sign: int, now: float) -> None:
        self._account(holding, sign, now)
        if self._base is not None and sign > 0:
            self._base.hold(holding)
        elif self._base is not None:
            self._base.let_go(holding)

    def _set_offer(self, number: int, offer: Offer | None) -> None:
        if offer is None:
            self.offers.pop(number, None)
        else:
            self.offers[number] = offer
        if self._base is not None:
            self._base.set_offer(number, offer)

    def _account(self, holding: Holding, sign: int, now: float) -> None:
        owner, devices = holding.ask.owner, len(holding.shares_bytes)
        amount = sum(holding.shares_bytes.values())
        self._held_devices[owner] = self._held_devices.get(owner, 0) + sign * devices
        self._held_bytes[owner] = self._held_bytes.get(owner, 0) + sign * amount
        self.uses.hold(owner, sign * devices, now)

    def free(self, shares_bytes: Mapping[int, int]) -> None:
        """Add memory to the offers: in a copy that looks ahead, instead of Capacity."""
        for number, amount in shares_bytes.items():
            offer = self.offers.get(number)
            if offer is not None:
                free = min(offer.memory_bytes, offer.free_bytes + amount)
                sessions = max(0, offer.sessions - 1)
                self._set_offer(number, replace(offer, free_bytes=free, sessions=sessions))

    def held(self, owner: str) -> tuple[int, int]:
        """Return devices and bytes that an owner has."""
        return self._held_devices.get(owner, 0), self._held_bytes.get(owner, 0)

    def over_quota(self, ask: Ask) -> set[Code]:
        """Return which quotas of its owner a request would exceed now."""
        quota = self.quotas.get(ask.owner)
        if quota is None:
            return set()
        devices, held_bytes = self.held(ask.owner)
        asked_bytes = max(1, ask.needs.memory_bytes or 1) * ask.needs.devices
        found = set()
        if quota.devices is not None and devices + ask.needs.devices > quota.devices:
            found.add(Code.QUOTA_DEVICES)
        if quota.memory_bytes is not None and held_bytes + asked_bytes > quota.memory_bytes:
            found.add(Code.QUOTA_MEMORY)
        return found

    def _over_memory(self, ask: Ask, chosen: list[Offer]) -> bool:
        """Return whether shares that are fractions of devices exceed the quota."""
        quota = self.quotas.get(ask.owner)
        if quota is None or quota.memory_bytes is None or ask.needs.fraction is None:
            return False  # a share without an amount is cut to what the quota leaves
        total = sum(offer.share_bytes(ask.needs) for offer in chosen)
        return self.held(ask.owner)[1] + total > quota.memory_bytes

    def could_hold(self, needs: Needs) -> bool:
        """Return whether today's devices could hold a request, were they empty."""
        able = [o for o in suitable(needs, self.offers.values()) if o.could_hold(needs)]
        return len(able) >= needs.devices
