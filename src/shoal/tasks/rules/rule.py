"""What a rule decides: who goes first, and when a request that does not fit keeps devices free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from shoal.tasks.reasons import Code
from shoal.tasks.requests import Ask
from shoal.tasks.use import Uses

#: A request that others overtook for this long is not overtaken any more, except by backfill.
PATIENCE_S = 600.0
#: What a request is taken to last if nobody knows.
UNKNOWN_S = 3600.0


class Rule(ABC):
    """A subclass in `shoal/tasks/rules/` is found by its `name`. It has no state."""

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    #: The reason of a request that others precede.
    precedes: ClassVar[Code] = Code.EARLIER
    #: A request that does not fit keeps devices free after waiting so long.
    patience_s: ClassVar[float] = PATIENCE_S
    #: Owners take turns by `Uses`, and `key` orders the requests of one owner.
    by_owner: ClassVar[bool] = False

    #: What it puts first takes devices from tasks of a lower priority that run.
    preempts: ClassVar[bool] = False

    @abstractmethod
    def key(self, ask: Ask, asked: float) -> tuple[float, ...]:
        """Return the place in line: lower goes first, then the earlier request. It never changes."""

    def turn(self, owner: str, uses: Uses, now: float) -> float:
        """Return the place of an owner among owners, where they take turns: lower goes first."""
        return 0.0

    @abstractmethod
    def explain(self, ahead: int, ask: Ask) -> str:
        """Say why that many requests go first, as the end of "6 requests go first: …"."""
