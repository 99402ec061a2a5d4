"""When an event closes, and in which order a rule grants its requests. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Rule = Literal["draw", "first-come", "least-waiting", "fair-share", "priority"]
RULES: tuple[Rule, ...] = ("draw", "first-come", "least-waiting", "fair-share", "priority")
Kind = Literal["time", "devices", "requests"]
AGE_STEP_S = 3600.0  # of waiting that counts as one step of priority


def iso_time(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


@dataclass(frozen=True, slots=True)
class Condition:
    """Closes an event: at a Unix time, with so many free devices, or with so many requests."""

    kind: Kind
    value: float

    def met(self, now: float, devices_free: int, requests: int) -> bool:
        found = {"time": now, "devices": devices_free, "requests": requests}[self.kind]
        return found >= self.value

    def text(self) -> str:
        if self.kind == "time":
            return f"at {iso_time(self.value)}"
        one = self.value == 1
        what = {"devices": "free", "requests": "there"}[self.kind]
        noun = self.kind.removesuffix("s") if one else self.kind
        return f"when {self.value:.0f} {noun} {'is' if one else 'are'} {what}"


def in_words(conditions: Iterable[Condition]) -> str:
    """Return the published condition. An admin's word closes every event."""
    return ", or ".join([*(c.text() for c in conditions), "when an admin says so"])


@dataclass(frozen=True, slots=True)
class Facts:
    """What the pool knows of a member when an event closes."""

    used_s: float = 0.0  # device seconds so far, aged
    weight: float = 1.0
    priority: int = 0  # higher is more urgent


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, as the rules see it."""

    at: float
    needs_s: float  # device seconds
    facts: Facts


def order(rule: Rule, asked: Mapping[str, Asked], now: float) -> list[str]:
    """Return the names in the order in which a rule grants. Equal requests: first come, then the name.

    `least-waiting` grants short requests first, which makes the mean wait least. `fair-share` prefers
    who used least for their weight. `priority` counts an hour of waiting as one step.
    """
    keys: dict[str, Callable[[Asked], float]] = {
        "first-come": lambda a: 0.0,
        "least-waiting": lambda a: a.needs_s,
        "fair-share": lambda a: a.facts.used_s / a.facts.weight,
        "priority": lambda a: -(a.facts.priority + (now - a.at) // AGE_STEP_S),
    }
    key = keys[rule]
    return sorted(asked, key=lambda name: (key(asked[name]), asked[name].at, name))
