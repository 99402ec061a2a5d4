"""Equal shares of device time for owners."""

from __future__ import annotations

from typing import ClassVar

from shoal.tasks.reasons import Code
from shoal.tasks.requests import Ask
from shoal.tasks.rules.rule import Rule
from shoal.tasks.use import Uses


class FairShare(Rule):
    """The owner who has used least goes first: device seconds over weight, halved once a day. The
    requests of one owner go in order of arrival.
    """

    name: ClassVar[str] = "fair-share"
    summary: ClassVar[str] = "the owner with the least device seconds over weight; half-life a day"
    precedes: ClassVar[Code] = Code.SHARE_USED
    by_owner: ClassVar[bool] = True

    def key(self, ask: Ask, asked: float) -> tuple[float, ...]:
        return (asked,)

    def turn(self, owner: str, uses: Uses, now: float) -> float:
        return uses.soon(owner, now) / uses.weight(owner)

    def explain(self, ahead: int, ask: Ask) -> str:
        who = "its owner has" if ahead == 1 else "their owners have"
        return f"{who} used less of the devices than {ask.owner}, or came earlier"
