"""By priority, with ageing."""

from __future__ import annotations

from typing import ClassVar

from shoal.tasks.reasons import Code
from shoal.tasks.requests import Ask
from shoal.tasks.rules.rule import Rule

#: A level of priority is worth this much waiting.
LEVEL_S = 6 * 3600.0


class Priority(Rule):
    """High before normal before low, then in order of arrival. A level is worth six hours of waiting:
    a request that waited as long passes newer ones of the next level. A task of a higher level takes
    devices from those of a lower one that are behind it, and never from its own level.
    """

    name: ClassVar[str] = "priority"
    summary: ClassVar[str] = "high, normal, low; a level is worth six hours of waiting"
    precedes: ClassVar[Code] = Code.PRIORITY
    preempts: ClassVar[bool] = True

    def key(self, ask: Ask, asked: float) -> tuple[float, ...]:
        return (asked - LEVEL_S * ask.priority,)

    def explain(self, ahead: int, ask: Ask) -> str:
        who = "it has" if ahead == 1 else "they have"
        return f"{who} a higher priority, or waited longer"
