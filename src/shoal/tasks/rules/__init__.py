"""Rules: who goes first. Each is a small pure class in a file of its own, found by its name."""

from __future__ import annotations

from shoal.tasks.rules.fair_share import FairShare
from shoal.tasks.rules.first_come import FirstCome
from shoal.tasks.rules.least_waiting import LeastWaiting
from shoal.tasks.rules.priority import Priority
from shoal.tasks.rules.rule import Rule

DEFAULT = LeastWaiting.name
RULES: dict[str, type[Rule]] = {
    rule.name: rule for rule in (LeastWaiting, FirstCome, FairShare, Priority)
}


def find(name: str) -> Rule:
    """Return a rule. The ValueError for an unknown name lists all.

    >>> find("first-come").summary
    'order of arrival; backfill by declared limits'
    """
    if name not in RULES:
        raise ValueError(f"there is no rule {name!r}; there are: {', '.join(RULES)}")
    return RULES[name]()
