"""The room of one round: what is free, and what is kept free for requests that cannot start yet.

A request that does not fit keeps the devices on which it can start first. A later one gets them only
if that delays nobody: it ends by its limit before they are needed, it fits beside, or it can be
suspended. Programs without a limit may end at any moment, so what they hold is needed from now on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.tasks.offer_index import OfferIndex
from shoal.tasks.requests import Ask, Holding
from shoal.tasks.room import Needs, Offer, in_order, pick, suitable


@dataclass(frozen=True, slots=True)
class Kept:
    """Memory of a device, for a request from `start` on."""

    share_bytes: int
    alone: bool
    start: float
    end: float


@dataclass(slots=True)
class _Wish:
    """What requests with equal needs keep free, all together. `times` of them keep every device that
    could hold them: `dated` says how many of these have a start there."""

    needs: Needs
    wanted: dict[int, int]  # bytes, of each device that could hold one
    stale: set[int]  # devices whose starts are to be worked out again
    starts: list[tuple[float, bool, int]] = field(default_factory=list)  # sorted
    dated: dict[int, int] = field(default_factory=dict)
    times: int = 0


class Base:
    """What is free and who holds what, kept in step by admission: no round makes it anew.

    Holdings that are not confirmed are not in the offers that come here, and are taken off them.
    """

    def __init__(self, offers: Mapping[int, Offer], holdings: Iterable[Holding]) -> None:
        self.index = OfferIndex()  # marked: a request that is alone has the device
        self.by_device: dict[int, dict[Holding, None]] = {}
        self.seen: dict[object, Any] = {}  # what somebody has worked out of it; until it changes
        self._alone: dict[int, int] = {}  # requests that are alone, by device
        self._on_the_way: dict[int, tuple[int, int]] = {}  # not confirmed: requests, bytes
        self._offers = dict(offers)
        for holding in holdings:
            self._note(holding, 1)
        for number in self._offers:
            self._renew(number)

    def set_offer(self, number: int, offer: Offer | None) -> None:
        """Take in what a device offers; None: it is gone."""
        if offer is None:
            self._offers.pop(number, None)
        else:
            self._offers[number] = offer
        self._renew(number)

    def hold(self, holding: Holding) -> None:
        self._note(holding, 1)
        for number in holding.shares_bytes:
            self._renew(number)

    def let_go(self, holding: Holding) -> None:
        self._note(holding, -1)
        for number in holding.shares_bytes:
            self._renew(number)

    def is_alone(self, number: int) -> bool:
        """Return whether a request that is alone has the device."""
        return self._alone.get(number, 0) > 0

    def _note(self, holding: Holding, sign: int) -> None:
        for number, amount in holding.shares_bytes.items():
            on_device = self.by_device.setdefault(number, {})
            if sign > 0:
                on_device[holding] = None
            else:
                del on_device[holding]
                if not on_device:
                    del self.by_device[number]
            if holding.ask.needs.alone:
                self._alone[number] = self._alone.get(number, 0) + sign
            if not holding.confirmed:
                requests, taken = self._on_the_way.get(number, (0, 0))
                self._on_the_way[number] = (requests + sign, taken + sign * amount)

    def _renew(self, number: int) -> None:
        self.seen.clear()
        offer = self._offers.get(number)
        if offer is None:
            self.index.remove(number)
            return
        requests, taken = self._on_the_way.get(number, (0, 0))
        if requests:
            free = max(0, offer.free_bytes - taken)
            offer = replace(offer, free_bytes=free, sessions=offer.sessions + requests)
        self.index.put(offer, marked=self.is_alone(number))


class Room:
    """A round's view of the base, with what the round keeps free."""

    def __init__(self, base: Base, now: float) -> None:
        self.now = now
        self.base = base
        self._kept: dict[int, list[Kept]] = {}  # with a start, by device
        self._wishes: dict[Needs, _Wish] = {}

    @property
    def offers(self) -> Mapping[int, Offer]:
        return self.base.index.offers

    def choose(self, ask: Ask, *, beside: bool = False, kept: bool = True) -> list[Offer]:
        """Return the devices for a request, with what it may take of them as free. Empty: it waits.

        Args:
            beside: it may share devices with others that are alone: the planner says so.
            kept: leave free what is kept.
        """
        marked = beside or not ask.needs.alone
        if not kept or not self._wishes or ask.can_suspend:
            return self.base.index.choose(ask.needs, marked=marked)
        open_to = []
        for offer in self.base.index.fitting(ask.needs, marked=marked):
            if ask.needs.only is None or offer.number in ask.needs.only:
                left = self._left(offer, ask)
                if left is not None:
                    open_to.append(left)
        return pick(ask.needs.devices, in_order(ask.needs, open_to))

    def _left(self, offer: Offer, ask: Ask) -> Offer | None:
        """Return a device without what is kept of it for others."""
        kept = self._kept.get(offer.number, ())
        ends = math.inf if ask.limit_s is None else self.now + ask.limit_s
        in_the_way = [k for k in kept if k.start < ends or ask.limit_s is None]
        total, alone = sum(k.share_bytes for k in in_the_way), any(k.alone for k in in_the_way)
        is_kept = bool(kept)
        for wish in self._wishes.values():
            more = (
                wish.times - wish.dated.get(offer.number, 0) if offer.number in wish.wanted else 0
            )
            if more:
                is_kept = True
                if ask.limit_s is None:
                    total += more * wish.wanted[offer.number]
                    alone |= wish.needs.alone
        if not is_kept:
            return offer
        if ask.needs.alone and alone:
            return None
        free = offer.free_bytes - total
        return replace(offer, free_bytes=free) if free > 0 else None

    def changed(self, numbers: Iterable[int]) -> None:
        """Note that a request of this round was admitted to these devices."""
        for wish in self._wishes.values():
            wish.stale.update(numbers)

    def keep_free(self, ask: Ask) -> None:
        """Keep devices for a request that does not fit, so that nobody behind it delays it."""
        wish = self._wishes.get(ask.needs)
        if wish is None:
            wish = self._wishes[ask.needs] = self._make_wish(ask.needs)
        starts = self._starts(wish)
        count = ask.needs.devices
        start = max((at for at, _, _ in starts[:count]), default=math.inf)
        if math.isinf(start):  # it comes after requests without a limit: keep all that it may need
            ahead = [k.start for number in wish.wanted for k in self._kept.get(number, ())]
            count, start = len(starts), max([self.now, *ahead])
        end = math.inf if ask.limit_s is None else start + ask.limit_s
        for _, _, number in starts[:count]:
            kept = Kept(wish.wanted[number], ask.needs.alone, start, end)
            self._kept.setdefault(number, []).append(kept)
            wish.dated[number] = wish.dated.get(number, 0) + 1
            self.changed((number,))
        # On the others it will probably not start; a request without a limit stays off them, too.
        wish.times += 1

    def _make_wish(self, needs: Needs) -> _Wish:
        able = [o for o in suitable(needs, self.offers.values()) if o.could_hold(needs)]
        wanted = {offer.number: _wanted(offer, needs) for offer in able}
        return _Wish(needs, wanted, stale=set(wanted))

    def _starts(self, wish: _Wish) -> list[tuple[float, bool, int]]:
        """Return when a share of each device could start, the first ones first."""
        if wish.stale:
            wish.starts = [one for one in wish.starts if one[2] not in wish.stale]
            for number in wish.stale:
                if number in wish.wanted:
                    offer = self.offers[number]
                    start, free = self._start(offer, wish), self._is_free(offer, wish.needs)
                    wish.starts.append((start, not free, number))
            wish.starts.sort()
            wish.stale.clear()
        return wish.starts

    def _is_free(self, offer: Offer, needs: Needs) -> bool:
        alone = needs.alone and self.base.is_alone(offer.number)
        return not alone and offer.share_bytes(needs) > 0

    def _start(self, offer: Offer, wish: _Wish) -> float:
        """Return when the device has room for a share, by what is declared; infinite: nobody knows."""
        wanted, needs = wish.wanted[offer.number], wish.needs
        kept = self._kept.get(offer.number, ())
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


def _wanted(offer: Offer, needs: Needs) -> int:
    """Return what a request takes of a device that is empty."""
    empty = replace(offer, free_bytes=offer.memory_bytes, sessions=0)
    return empty.share_bytes(needs)
