"""Offers, kept so that the best for a request are found without a look at all of them. Pure.

`OfferIndex.choose(needs)` gives the answer of `pick(needs.devices, in_order(needs, offers))`. Devices
that are alike for every request are in one row: of equal kind, size and sessions. In a row, sorted by
what is free, those with room for a request come first. So a look at the first of each row is enough.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from shoal.tasks.room import Needs, Offer, in_order, is_of_kind, pick, suitable

_is_of_kind = lru_cache(maxsize=4096)(is_of_kind)


class _Row(NamedTuple):
    """What offers have in common that differ only in what is free."""

    sessions: int
    kind: str
    memory_bytes: int
    elastic: bool
    marked: bool


class OfferIndex:
    """
    >>> index = OfferIndex([Offer(0, "a", "n", "cpu", 9, 9, 0), Offer(1, "b", "n", "cpu", 9, 7, 0)])
    >>> [offer.name for offer in index.choose(Needs(memory_bytes=8))]
    ['a']
    """

    def __init__(self, offers: Iterable[Offer] = ()) -> None:
        self.offers: dict[int, Offer] = {}
        self._rows: dict[_Row, list[tuple[int, int]]] = {}  # sorted: -free bytes, number
        self._row_of: dict[int, _Row] = {}
        self._nodes: dict[str, dict[int, Offer]] = {}
        self._ordered: list[_Row] | None = None  # by sessions
        for offer in offers:
            self.put(offer)

    def put(self, offer: Offer, *, marked: bool = False) -> None:
        """Add an offer, or replace the one with its number. `choose` can leave out marked ones."""
        before = self.offers.get(offer.number)
        row = _Row(offer.sessions, offer.kind, offer.memory_bytes, offer.elastic, marked)
        if before is not None:
            if before == offer and self._row_of[offer.number] == row:
                return
            self._take_out(before)
            if before.node != offer.node:
                self._leave_node(before)
        self.offers[offer.number] = offer
        self._nodes.setdefault(offer.node, {})[offer.number] = offer
        self._row_of[offer.number] = row
        in_row = self._rows.get(row)
        if in_row is None:
            self._rows[row] = [(-offer.free_bytes, offer.number)]
            self._ordered = None
        else:
            insort(in_row, (-offer.free_bytes, offer.number))

    def remove(self, number: int) -> None:
        offer = self.offers.pop(number, None)
        if offer is not None:
            self._take_out(offer)
            self._leave_node(offer)

    def _take_out(self, offer: Offer) -> None:
        row = self._row_of.pop(offer.number)
        in_row = self._rows[row]
        del in_row[bisect_left(in_row, (-offer.free_bytes, offer.number))]
        if not in_row:
            del self._rows[row]
            self._ordered = None

    def _leave_node(self, offer: Offer) -> None:
        on_node = self._nodes[offer.node]
        del on_node[offer.number]
        if not on_node:
            del self._nodes[offer.node]

    # --- looking -----------------------------------------------------------------------------------

    def choose(self, needs: Needs, *, marked: bool = True) -> list[Offer]:
        """Return the devices for a request, by number; none if there are too few.

        Args:
            marked: it may have marked ones.
        """
        count = needs.devices
        if needs.only is not None:
            named = [self.offers[n] for n in sorted(needs.only) if n in self.offers]
            if not marked:
                named = [o for o in named if not self._row_of[o.number].marked]
            return pick(count, in_order(needs, suitable(needs, named)))
        if count == 1:
            best = next(self.fitting(needs, marked=marked), None)
            return [best] if best is not None else []
        return self._several(needs, marked)

    def _several(self, needs: Needs, marked: bool) -> list[Offer]:
        """Return devices of one node, if one has enough; of these nodes the one with the best."""
        count, first, seen = needs.devices, list[Offer](), set[str]()
        one_may = any(len(on_node) >= count for on_node in self._nodes.values())
        for offer in self.fitting(needs, marked=marked):
            if len(first) < count:
                first.append(offer)
            elif not one_may:
                break
            if one_may and offer.node not in seen:
                seen.add(offer.node)
                on_node = self._nodes[offer.node]
                if len(on_node) < count:
                    continue
                there = (o for o in on_node.values() if marked or not self._row_of[o.number].marked)
                whole = in_order(needs, suitable(needs, there))
                if len(whole) >= count:
                    return sorted(whole[:count], key=lambda o: o.number)
        return sorted(first, key=lambda o: o.number) if len(first) == count else []

    def fitting(self, needs: Needs, *, marked: bool = True) -> Iterator[Offer]:
        """Yield the offers with room for a share, the best first. Nothing may change meanwhile."""
        alike: list[_Row] = []
        for row in self._by_sessions():
            if alike and row.sessions != alike[0].sessions:
                yield from self._of_rows(alike, needs)
                alike = []
            if (marked or not row.marked) and _is_of_kind(row.kind, needs.kind):
                alike.append(row)
        yield from self._of_rows(alike, needs)

    def _by_sessions(self) -> list[_Row]:
        if self._ordered is None:
            self._ordered = sorted(self._rows)
        return self._ordered

    def _of_rows(self, rows: list[_Row], needs: Needs) -> Iterator[Offer]:
        """Yield what fits of rows with equally many sessions."""
        for _, number in heapq.merge(*(self._of_row(row, needs) for row in rows)):
            yield self.offers[number]

    def _of_row(self, row: _Row, needs: Needs) -> Iterator[tuple[int, int]]:
        for entry in self._rows[row]:
            if self.offers[entry[1]].share_bytes(needs) <= 0:
                return  # those behind it have less
            yield entry

    def could_ever(self, needs: Needs) -> bool:
        """Return whether there are enough devices for a request, were they empty."""
        count = 0
        for row, in_row in self._rows.items():
            if not _is_of_kind(row.kind, needs.kind):
                continue
            empty = Offer(0, "", "", row.kind, row.memory_bytes, row.memory_bytes, 0, row.elastic)
            if empty.share_bytes(needs) > 0:
                if needs.only is None:
                    count += len(in_row)
                else:
                    count += sum(number in needs.only for _, number in in_row)
            if count >= needs.devices:
                return True
        return False
