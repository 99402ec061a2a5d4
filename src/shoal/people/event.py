"""An event of people: enrol, ask, close, screen, grant. Pure: time and free devices are passed in.

    open ──condition or word──▶ closed ──rule──▶ done
      └────────── cancel ─────────┴──▶ cancelled

Whoever enters the code on the screen is *enrolled*: the set. Whoever asks for a place has a *request*;
M of them may come, also from outside the set. At the close, those outside the set are struck out with
the reason, and N remain. The rule puts them in order, and the first `places` are granted. Every
request ends exactly once: granted, not-drawn, struck-out or withdrawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from shoal.errors import ShoalError
from shoal.people import draw, rules
from shoal.people.draw import Entry, Proof, StruckOut, Terms
from shoal.people.rules import Condition, Facts, Rule

State = Literal["open", "closed", "done", "cancelled"]
Standing = Literal["waiting", "approved", "refused", "revoked"]
Approval = Literal["everyone", "members", "hand"]
Ended = Literal["granted", "not-drawn", "struck-out", "withdrawn", "cancelled"]

ENTRANTS_MAX = draw.ENTRIES_MAX
PAUSE_S = 10.0  # between the list and the result, so that everybody sees the list's hash first


class EventError(ShoalError):
    """An event does not accept this. The text says why."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What an admin decides when an event opens; nothing of it changes later."""

    event: str
    title: str
    places: int
    rule: Rule
    conditions: tuple[Condition, ...]  # any of them closes the event; an admin's word always does
    approval: Approval
    opened_at: float  # Unix time
    capacity: int = ENTRANTS_MAX
    devices: int = 1  # of each grant
    memory_bytes: int | None = None
    minutes: float = 60.0

    def terms(self) -> Terms:
        return Terms(
            self.event, self.title, self.places, rules.in_words(self.conditions),
            rules.iso_time(self.opened_at),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entrant:
    """Somebody of the set: a member of the pool, or a guest with a browser."""

    name: str
    member: bool
    standing: Standing
    tickets: int
    enrolled_at: float


@dataclass(frozen=True, slots=True)
class Request:
    """Somebody asks for a place."""

    name: str
    own: str  # 16 bytes of the entrant's, in hex
    asked_at: float
    minutes: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended."""

    name: str
    ended: Ended
    reason: str = ""  # of a struck-out one
    rank: int = 0  # from 1, of those that the rule put in order


@dataclass(slots=True)
class Event:
    """The state of one event. Methods return what changed; the head stores and announces it."""

    settings: Settings
    seed: str  # secret until the event is done
    state: State = "open"
    entrants: dict[str, Entrant] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    entries: tuple[Entry, ...] = ()
    struck_out: tuple[StruckOut, ...] = ()
    order: tuple[str, ...] = ()  # by a rule other than the draw, fixed at the close
    closed_at: float | None = None
    closed_by: str = ""
    wrong_codes: int = 0

    @property
    def commitment(self) -> str:
        return draw.commit(self.settings.terms(), self.seed)

    @property
    def list_hash(self) -> str:
        """The hash of the list; empty while the event is open."""
        if self.state not in ("closed", "done"):
            return ""
        return draw.hash_list(self.commitment, self.entries, self.struck_out)

    # --- while it is open --------------------------------------------------------------------------

    def _must_be_open(self) -> None:
        if self.state != "open":
            raise EventError(f'the event "{self.settings.title}" is {self.state}')

    def enrol(self, name: str, member: bool, now: float) -> Entrant:
        """Associate somebody who entered the code. A second time changes nothing."""
        self._must_be_open()
        if name in self.entrants:
            return self.entrants[name]
        if len(self.entrants) >= self.settings.capacity:
            raise EventError(
                f'the event "{self.settings.title}" is full: {self.settings.capacity} are enrolled'
            )
        approval = self.settings.approval
        good = approval == "everyone" or (approval == "members" and member)
        entrant = Entrant(name, member, "approved" if good else "waiting", 1, now)
        self.entrants[name] = entrant
        return entrant

    def decide(self, name: str, approve: bool, tickets: int = 1) -> Entrant:
        """Approve or refuse an entrant by hand."""
        self._must_be_open()
        if name not in self.entrants:
            raise EventError(f'{name} is not enrolled for "{self.settings.title}"')
        if not 1 <= tickets <= draw.TICKETS_MAX:
            raise EventError(f"tickets must be from 1 to {draw.TICKETS_MAX} (got {tickets})")
        entrant = self.entrants[name]
        if entrant.standing == "revoked":
            raise EventError(f"{name} was revoked by an admin")
        standing: Standing = "approved" if approve else "refused"
        self.entrants[name] = replace(entrant, standing=standing, tickets=tickets)
        return self.entrants[name]

    def revoke(self, name: str) -> Entrant | None:
        """Somebody lost the right to the pool. After the close, the list stays as it was published."""
        entrant = self.entrants.get(name)
        if entrant is None or self.state != "open":
            return None
        self.entrants[name] = replace(entrant, standing="revoked")
        return self.entrants[name]

    def ask(self, name: str, own: str, now: float, minutes: float | None = None) -> str:
        """Ask for a place, and return the receipt. The last request of a name counts."""
        self._must_be_open()
        if not draw.MEMBER.fullmatch(name):
            raise EventError(f"{name!r} cannot ask: a name has a-z, 0-9 and dashes")
        if len(own) != 2 * draw.OWN_BYTES or any(c not in "0123456789abcdef" for c in own):
            raise EventError(
                f"your own bytes are {2 * draw.OWN_BYTES} digits of 0-9a-f (got {own!r})"
            )
        if name not in self.requests and len(self.requests) >= ENTRANTS_MAX:
            raise EventError(f"the event has {ENTRANTS_MAX} requests, which is the limit")
        asked = self.settings.minutes if minutes is None else minutes
        if not 0 < asked <= self.settings.minutes:
            raise EventError(
                f"minutes must be above 0 and at most {self.settings.minutes:g} (got {asked:g})"
            )
        before = self.requests.get(name)
        at = before.asked_at if before is not None else now
        self.requests[name] = Request(name, own, at, asked)
        self.outcomes.pop(name, None)
        return self.receipt(name)

    def receipt(self, name: str) -> str:
        """Return the receipt of a request."""
        return draw.receipt(self.settings.event, name, self.requests[name].own)

    def withdraw(self, name: str) -> None:
        """Take a request back."""
        self._must_be_open()
        if self.requests.pop(name, None) is None:
            raise EventError(f'{name} has no request for "{self.settings.title}"')
        self.outcomes[name] = Outcome(name, "withdrawn")

    # --- the close and what follows ----------------------------------------------------------------

    def met(self, now: float, devices_free: int) -> Condition | None:
        """Return the condition that closes the event now."""
        if self.state != "open":
            return None
        for condition in self.settings.conditions:
            if condition.met(now, devices_free, len(self.requests)):
                return condition
        return None

    def screen(self, name: str, holders: frozenset[str]) -> str:
        """Return why a request is struck out; empty if it remains."""
        entrant = self.entrants.get(name)
        if entrant is None:
            return "not-enrolled"
        if entrant.standing != "approved":
            return {"waiting": "not-approved"}.get(entrant.standing, entrant.standing)
        return "has-a-grant" if name in holders else ""

    def close(
        self,
        now: float,
        by: str,
        facts: Mapping[str, Facts] | None = None,
        holders: frozenset[str] = frozenset(),
    ) -> None:
        """Fix the list. Nothing that anybody does afterwards changes the result."""
        self._must_be_open()
        reasons = {name: self.screen(name, holders) for name in self.requests}
        self.entries = tuple(
            Entry(name, self.entrants[name].tickets, self.requests[name].own)
            for name in sorted(reasons)
            if not reasons[name]
        )
        self.struck_out = tuple(StruckOut(n, r) for n, r in sorted(reasons.items()) if r)
        if self.settings.rule != "draw":
            known = facts or {}
            asked = {
                e.member: rules.Asked(
                    self.requests[e.member].asked_at,
                    self.settings.devices * self.requests[e.member].minutes * 60,
                    known.get(e.member, Facts()),
                )
                for e in self.entries
            }
            self.order = tuple(rules.order(self.settings.rule, asked, now))
        self.state = "closed"
        self.closed_at = now
        self.closed_by = by

    def due(self, now: float) -> bool:
        """Return whether the result should be made now. Only a draw pauses before it."""
        if self.state != "closed" or self.closed_at is None:
            return False
        return self.settings.rule != "draw" or now >= self.closed_at + PAUSE_S

    def finish(self) -> list[Outcome]:
        """Make the result. It depends on the seed and the list alone, so it may be made again."""
        if self.state != "closed":
            raise EventError(
                f'the event "{self.settings.title}" is {self.state}; close it first: shoal event close'
            )
        order = [r.member for r in self._ranks()] if self.settings.rule == "draw" else self.order
        for number, name in enumerate(order, 1):
            won = number <= self.settings.places
            self.outcomes[name] = Outcome(name, "granted" if won else "not-drawn", "", number)
        for struck in self.struck_out:
            self.outcomes[struck.member] = Outcome(struck.member, "struck-out", struck.reason)
        self.state = "done"
        return [self.outcomes[name] for name in self.requests]

    def _ranks(self) -> tuple[draw.Rank, ...]:
        return draw.rank(self.seed, self.list_hash, self.entries)

    def cancel(self) -> None:
        """End an event without a result."""
        if self.state not in ("open", "closed"):
            raise EventError(f'the event "{self.settings.title}" is {self.state} already')
        self.state = "cancelled"
        for name in self.requests:
            self.outcomes[name] = Outcome(name, "cancelled")

    @property
    def winners(self) -> list[str]:
        """The names that were granted a place, in order."""
        won = [o for o in self.outcomes.values() if o.ended == "granted"]
        return [o.name for o in sorted(won, key=lambda o: o.rank)]

    def proof(self) -> Proof:
        """Return what others need to check a draw."""
        if self.state != "done" or self.settings.rule != "draw":
            raise EventError(
                f'the event "{self.settings.title}" has no proof: its rule is {self.settings.rule}, '
                f"and it is {self.state}. A draw has one when it is done."
            )
        return draw.prove(self.settings.terms(), self.seed, self.entries, self.struck_out)
