"""Admission without indices, as a reference: it looks at every device and at everybody who waits."""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Iterator
from dataclasses import replace

from shoal.tasks.admission import KEEPING_MAX, Admission
from shoal.tasks.backfill import Base, Kept, Room, _wanted
from shoal.tasks.line import Shape
from shoal.tasks.requests import Ask, Output, Waiting
from shoal.tasks.room import Needs, Offer, in_order, pick, suitable


class ScanningRoom(Room):
    """Keeps a note at every device for every request, and looks at each device for every request."""

    def __init__(self, base: Base, now: float) -> None:
        super().__init__(base, now)
        self._notes: dict[int, list[Kept]] = {}

    def choose(self, ask: Ask, *, beside: bool = False, kept: bool = True) -> list[Offer]:
        marked = beside or not ask.needs.alone
        open_to = []
        for offer in suitable(ask.needs, self.offers.values()):
            if not marked and self.base.is_alone(offer.number):
                continue
            left = self._left(offer, ask) if kept else offer
            if left is not None:
                open_to.append(left)
        return pick(ask.needs.devices, in_order(ask.needs, open_to))

    def _left(self, offer: Offer, ask: Ask) -> Offer | None:
        """Return a device without what is kept of it for others."""
        kept = self._notes.get(offer.number)
        if not kept or ask.can_suspend:
            return offer
        ends = math.inf if ask.limit_s is None else self.now + ask.limit_s
        in_the_way = [k for k in kept if k.start < ends or ask.limit_s is None]
        if ask.needs.alone and any(k.alone for k in in_the_way):
            return None
        free = offer.free_bytes - sum(k.share_bytes for k in in_the_way)
        return replace(offer, free_bytes=free) if free > 0 else None

    def keep_free(self, ask: Ask) -> None:
        """Keep devices for a request that does not fit, so that nobody behind it delays it."""
        starts = sorted(
            (self._start(offer, ask.needs), not self._is_free(offer, ask.needs), offer.number)
            for offer in suitable(ask.needs, self.offers.values())
            if offer.could_hold(ask.needs)
        )
        count = ask.needs.devices
        start = max((at for at, _, _ in starts[:count]), default=math.inf)
        if math.isinf(start):  # it comes after requests without a limit: keep all that it may need
            ahead = [k.start for _, _, number in starts for k in self._notes.get(number, ())]
            count, start = len(starts), max([self.now, *(at for at in ahead if at < math.inf)])
        end = math.inf if ask.limit_s is None else start + ask.limit_s
        for place, (_, _, number) in enumerate(starts):
            amount = _wanted(self.offers[number], ask.needs)
            # On the others it will probably not start; a request without a limit stays off them, too.
            times = (start, end) if place < count else (math.inf, math.inf)
            self._notes.setdefault(number, []).append(Kept(amount, ask.needs.alone, *times))

    def _is_free(self, offer: Offer, needs: Needs) -> bool:
        alone = needs.alone and self.base.is_alone(offer.number)
        return not alone and offer.share_bytes(needs) > 0

    def _start(self, offer: Offer, needs: Needs) -> float:
        """Return when the device has room for a share, by what is declared; infinite: nobody knows."""
        wanted = _wanted(offer, needs)
        kept = [k for k in self._notes.get(offer.number, []) if not math.isinf(k.start)]
        holdings = list(self.base.by_device.get(offer.number, ()))
        moments = {self.now, *(h.ends(self.now) for h in holdings), *(k.end for k in kept)}
        for at in sorted(moments):
            if math.isinf(at):
                break
            ended = [h for h in holdings if h.ends(self.now) <= at]
            ahead = [k for k in kept if k.end > at]
            free = offer.free_bytes + sum(h.shares_bytes[offer.number] for h in ended)
            alone = any(h.ask.needs.alone for h in holdings if h not in ended)
            if needs.alone and (alone or any(k.alone for k in ahead)):
                continue
            if min(free, offer.memory_bytes) - sum(k.share_bytes for k in ahead) >= wanted:
                return at
        return math.inf


class Scanning(Admission):
    def room(self, now: float) -> Room:
        base = Base(self.offers, self.holdings.values())

        self._base = base
        return ScanningRoom(base, now)

    def place(self, request: str) -> int | None:
        return None

    def in_turn(self, now: float, skip: Container[Shape] = ()) -> Iterator[Waiting]:
        """One line for each owner, or for all. It skips nobody."""
        lines: dict[str, list[Waiting]] = {}
        for waiting in sorted(self.waiting.values(), key=lambda w: (w.key, w.number)):
            lines.setdefault(waiting.ask.owner if self.rule.by_owner else "", []).append(waiting)
        heads: list[tuple[float, tuple[float, ...], int, str, int]] = []

        def push(owner: str, place: int) -> None:
            if place < len(lines[owner]):
                found = lines[owner][place]
                turn = self.rule.turn(owner, self.uses, now)
                heapq.heappush(heads, (turn, found.key, found.number, owner, place))

        for owner in lines:
            push(owner, 0)
        while heads:
            turn, key, number, owner, place = heapq.heappop(heads)
            again = self.rule.turn(owner, self.uses, now)
            if again > turn:
                heapq.heappush(heads, (again, key, number, owner, place))
                continue
            yield lines[owner][place]
            push(owner, place + 1)

    def _decide(self, now: float) -> list[Output]:
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
        keeping = 0
        for waiting in self.in_turn(now):
            ask = waiting.ask
            if waiting.holds or waiting.not_before > now or self.over_quota(ask):
                continue
            keeps = now - waiting.asked >= self.rule.patience_s
            if ask.by_plan and planned:
                if not self.planning.open or ask.request in self.planning.placed:
                    continue
                ask, keeps = ask.on(self.planning.open), False
            alike = (ask.needs, ask.limit_s, ask.can_suspend)
            chosen = [] if alike in failed else room.choose(ask)
            if chosen and not self._over_memory(ask, chosen):
                taken = {offer.number for offer in chosen}
                self.planning = replace(self.planning, open=self.planning.open - taken)
                admitted.append(self._admit(waiting, chosen, now))
                if not self._anything_fits(room):
                    break
                continue
            failed.add(alike)
            if keeps and not chosen and self.could_hold(ask.needs):
                keeping += 1
                if keeping > KEEPING_MAX:
                    break
                room.keep_free(ask)
        return admitted
