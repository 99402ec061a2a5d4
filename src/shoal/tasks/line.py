"""What waits, by shape: of requests that are admitted alike, only the first needs a look."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.tasks.requests import Waiting
from shoal.tasks.room import Needs


class Shape(NamedTuple):
    """What is equal of requests that are admitted alike."""

    owner: str  # "": of anybody whose turn and quota do not matter
    needs: Needs
    limit_s: float | None
    can_suspend: bool
    by_plan: bool
    held: bool

    @classmethod
    def of(cls, waiting: Waiting, by_owner: bool) -> Shape:
        ask = waiting.ask
        owner, held = ask.owner if by_owner else "", bool(waiting.holds)
        return cls(owner, ask.needs, ask.limit_s, ask.can_suspend, ask.by_plan, held)


@dataclass(slots=True)
class Line:
    """What waits of one shape."""

    entries: list[tuple[tuple[float, ...], int, Waiting]] = field(default_factory=list)  # sorted
    oldest: float = math.inf  # none of them asked before

    def place(self, waiting: Waiting) -> int:
        """Return the place of a request, from 0; of one that is gone, the place of the next."""
        key = (waiting.key, waiting.number)
        return bisect_left(self.entries, key, key=lambda one: one[:2])

    def after(self, waiting: Waiting) -> Waiting | None:
        """Return the first of them behind a request, which may be gone."""
        at = self.place(waiting)
        if at < len(self.entries) and self.entries[at][2] is waiting:
            at += 1
        return self.entries[at][2] if at < len(self.entries) else None


class Lines:
    """All that waits, each in the line of its shape."""

    def __init__(self) -> None:
        self.by_shape: dict[Shape, Line] = {}
        self.shapes: dict[str, Shape] = {}  # by request
        self._order: list[tuple[tuple[float, ...], int]] = []  # sorted; of all lines

    def copy(self) -> Lines:
        made = Lines()
        made.by_shape = {s: Line(list(one.entries), one.oldest) for s, one in self.by_shape.items()}
        made.shapes, made._order = dict(self.shapes), list(self._order)
        return made

    def add(self, waiting: Waiting, shape: Shape) -> None:
        self.shapes[waiting.ask.request] = shape
        insort(self._order, (waiting.key, waiting.number))
        line = self.by_shape.setdefault(shape, Line())
        insort(line.entries, (waiting.key, waiting.number, waiting))
        line.oldest = min(line.oldest, waiting.asked)

    def remove(self, waiting: Waiting) -> None:
        del self._order[bisect_left(self._order, (waiting.key, waiting.number))]
        shape = self.shapes.pop(waiting.ask.request)
        line = self.by_shape[shape]
        del line.entries[line.place(waiting)]
        if not line.entries:
            del self.by_shape[shape]

    def ahead_of(self, waiting: Waiting) -> int:
        """Return how many go before a request by their keys alone."""
        return bisect_left(self._order, (waiting.key, waiting.number))

    def waited_s(self, shape: Shape, now: float) -> float:
        """Return how long the oldest of a shape has waited at most."""
        return now - self.by_shape[shape].oldest
