"""The least waiting in all: shortest work first, with ageing."""

from __future__ import annotations

from typing import ClassVar

from shoal.tasks.reasons import Code
from shoal.tasks.requests import Ask
from shoal.tasks.rules.rule import UNKNOWN_S, Rule

#: A request is passed by shorter ones that come within this multiple of its own work.
AGEING = 4.0


class LeastWaiting(Rule):
    """Shortest expected work first. Work is expected seconds times devices; if nobody knows how long a
    request lasts, it counts as an hour. A request with work w is passed only by requests that come
    within 4·w after it, so none waits for ever.
    """

    name: ClassVar[str] = "least-waiting"
    summary: ClassVar[str] = "shortest expected work first, with ageing"
    precedes: ClassVar[Code] = Code.OUTBID

    def key(self, ask: Ask, asked: float) -> tuple[float, ...]:
        lasts_s = UNKNOWN_S if ask.lasts_s is None else ask.lasts_s
        return (asked + AGEING * lasts_s * ask.needs.devices,)

    def explain(self, ahead: int, ask: Ask) -> str:
        who = "it saves" if ahead == 1 else "they save"
        return f"{who} more waiting, being shorter or older"
