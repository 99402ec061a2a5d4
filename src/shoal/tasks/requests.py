"""What admission hears and what it answers. `admission.Admission.step` takes an input, returns outputs.

A request is a waiting lease or a task. Its name is unique in the pool and never used again. Times are
seconds of one clock, the caller's.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shoal.tasks.reasons import Code, Reason
from shoal.tasks.room import Needs, Offer


class Priority(enum.IntEnum):
    LOW = -1
    NORMAL = 0
    HIGH = 1


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, as its owner made it."""

    request: str
    owner: str
    needs: Needs = field(default_factory=Needs)
    priority: Priority = Priority.NORMAL
    limit_s: float | None = None  # it ends after this long at the latest; None: not declared
    expected_s: float | None = None  # from its profile or earlier runs; None: not known
    probably_s: float | None = None  # by earlier runs: for estimates, it moves nobody in line
    until: float | None = None  # it must have been admitted by then, or it expires
    can_suspend: bool = False  # its devices can be taken back at any moment
    asked: float | None = None  # when it was asked, if that was before now (a head that restarted)
    by_plan: bool = False  # while a planner decides, the rule does not admit it

    @property
    def lasts_s(self) -> float | None:
        """Return how long it will probably hold devices; None: nobody knows."""
        known = [s for s in (self.expected_s, self.limit_s) if s is not None]
        return min(known) if known else None

    @property
    def estimated_s(self) -> float | None:
        """Return how long it will probably hold devices, also by what was measured."""
        if self.probably_s is None:
            return self.lasts_s
        return self.probably_s if self.limit_s is None else min(self.probably_s, self.limit_s)

    def on(self, devices: frozenset[int]) -> Ask:
        """Return the request as if it had asked for these devices only."""
        return replace(self, needs=replace(self.needs, only=devices))


# --- inputs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """A request begins to wait."""

    ask: Ask
    holds: tuple[Reason, ...] = ()  # it is held from the start for these reasons


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A request that waits or was admitted is over: its owner or its client does not want it."""

    request: str


@dataclass(frozen=True, slots=True)
class Held:
    """A request takes no part until this is released. There may be several holds, one per code."""

    request: str
    reason: Reason  # code HELD by its owner; NO_RUNNER, AFTER, … by what it waits for


@dataclass(frozen=True, slots=True)
class Released:
    request: str
    code: Code = Code.HELD


@dataclass(frozen=True, slots=True)
class Capacity:
    """Devices have changed: what is free on them, as the lease table counts it."""

    offers: tuple[Offer, ...] = ()  # new or changed
    gone: tuple[int, ...] = ()
    missing: tuple[str, ...] | None = None  # devices of silent nodes, all of them; None: as before


@dataclass(frozen=True, slots=True)
class Quota:
    """What an owner may hold at once, and its weight for fair shares."""

    owner: str
    devices: int | None = None
    memory_bytes: int | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Granted:
    """A request has its devices. It was admitted, or never waited (`ask` is given)."""

    request: str
    shares_bytes: Mapping[int, int]  # by device number
    until: float | None = None  # its lease ends then
    ask: Ask | None = None


@dataclass(frozen=True, slots=True)
class NotGranted:
    """A request that was admitted did not get its devices: it waits again, in its old place."""

    request: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that had devices has none any more."""

    request: str


@dataclass(frozen=True, slots=True)
class Returned:
    """A request has given its devices back and waits again, in its place: a task was suspended."""

    ask: Ask


@dataclass(frozen=True, slots=True)
class Planned:
    """The planner's decision: these devices, also beside others. Admission checks quotas and memory."""

    request: str
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Planning:
    """A planner decides for requests that are left to it. The rule admits them on `open` devices, which
    the last plan left idle, except those that are `placed`; when `until` has passed, on all devices."""

    until: float
    open: frozenset[int] = frozenset()
    placed: frozenset[str] = frozenset()  # they wait for their place in the plan


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Input = (
    Asked | Withdrawn | Held | Released | Capacity | Quota | Granted | NotGranted | Ended | Returned
    | Planned | Planning | Tick
)  # fmt: skip

# --- outputs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admit:
    """This request may have these devices now. The caller answers with Granted or NotGranted."""

    request: str
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Expire:
    """This request is over: it was to be admitted by its `until`."""

    request: str


Output = Admit | Expire

# --- state -----------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits."""

    ask: Ask
    asked: float
    number: int  # order of arrival
    key: tuple[float, ...] = ()  # of its rule: lower goes first
    holds: Mapping[Code, Reason] = field(default_factory=dict)
    not_before: float = 0.0  # it was admitted and did not get its devices: it tries again then


@dataclass(slots=True, eq=False)
class Holding:
    """A request that has devices, or was admitted and is about to get them."""

    ask: Ask
    since: float
    shares_bytes: Mapping[int, int]
    until: float | None = None  # its lease ends then
    confirmed: bool = True  # False: admitted, not granted yet
    waiting: Waiting | None = None  # what it goes back to if it is not granted

    def ends(self, now: float) -> float:
        """Return when its devices are free by its declaration. One without may end at any moment."""
        ends = [self.until] if self.until is not None else []
        if self.ask.limit_s is not None:
            ends.append(self.since + self.ask.limit_s)
        return max(now, min(ends)) if ends else now

    def expected_end(self, now: float, unknown_s: float) -> float:
        """Return when its devices are probably free."""
        known = self.ask.estimated_s
        end = self.since + (unknown_s if known is None else known)
        if self.until is not None:
            end = min(end, self.until)
        return max(now, end)
