"""First come, first served, with backfill by declared limits."""

from __future__ import annotations

from typing import ClassVar

from shoal.tasks.requests import Ask
from shoal.tasks.rules.rule import Rule


class FirstCome(Rule):
    """Strictly in order of arrival. A later request goes earlier only if that delays nobody ahead:
    it ends by its limit before the devices are needed, or takes what they leave, or can be suspended.
    """

    name: ClassVar[str] = "first-come"
    summary: ClassVar[str] = "order of arrival; backfill by declared limits"
    patience_s: ClassVar[float] = 0.0

    def key(self, ask: Ask, asked: float) -> tuple[float, ...]:
        return (asked,)

    def explain(self, ahead: int, ask: Ask) -> str:
        return "it came earlier" if ahead == 1 else "they came earlier"
