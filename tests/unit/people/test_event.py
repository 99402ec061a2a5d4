"""Events: nobody outside the set is granted anything, the numbers add up, everybody ends once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.people import draw, rules
from shoal.people.event import PAUSE_S, Event, EventError, Settings
from shoal.people.rules import Asked, Condition, Facts

NAMES = [f"m{i}" for i in range(9)]
SEED = "5e" * 32
name_of = st.sampled_from(NAMES)
CONDITIONS = st.builds(Condition, st.just("requests"), st.integers(1, 9))


def opened(
    rule: rules.Rule = "draw", places: int = 2, approval: str = "everyone", **more: object
) -> Event:
    conditions = more.pop("conditions", ())
    made = Settings("K7Q", "GPU hour", places, rule, conditions, approval, 1000.0, **more)  # type: ignore[arg-type]
    return Event(made, SEED)


def own(name: str) -> str:
    return name.encode().hex().ljust(32, "0")


class Life(RuleBasedStateMachine):
    """Any order of what people and admins may do, against a model that only counts."""

    def __init__(self) -> None:
        super().__init__()
        self.event = opened()
        self.now = 1000.0
        self.asked: set[str] = set()
        self.approved: set[str] = set()
        self.at_close: tuple[object, ...] = ()
        self.list_hash = ""

    @rule(chosen=st.sampled_from(rules.RULES), places=st.integers(1, 4),
          approval=st.sampled_from(["everyone", "members", "hand"]),
          conditions=st.lists(CONDITIONS, max_size=1))  # fmt: skip
    @precondition(
        lambda self: (
            not self.event.entrants and not self.event.requests and self.event.state == "open"
        )
    )
    def open_another(
        self, chosen: rules.Rule, places: int, approval: str, conditions: list[Condition]
    ) -> None:
        self.event = opened(chosen, places, approval, conditions=tuple(conditions), capacity=7)

    @rule(name=name_of, member=st.booleans(), seconds=st.floats(0, 5000))
    def enrol(self, name: str, member: bool, seconds: float) -> None:
        self.now += seconds
        known = name in self.event.entrants
        full = len(self.event.entrants) >= 7
        if self.event.state != "open" or (full and not known):
            if full and self.event.settings.capacity > 7 and self.event.state == "open":
                return
            with pytest.raises(EventError):
                self.event.enrol(name, member, self.now)
            return
        found = self.event.enrol(name, member, self.now)
        if found.standing == "approved":
            self.approved.add(name)

    @rule(name=name_of, yes=st.booleans(), tickets=st.integers(1, 3))
    def decide(self, name: str, yes: bool, tickets: int) -> None:
        entrant = self.event.entrants.get(name)
        if self.event.state != "open" or entrant is None or entrant.standing == "revoked":
            with pytest.raises(EventError):
                self.event.decide(name, yes, tickets)
            return
        self.event.decide(name, yes, tickets)
        (self.approved.add if yes else self.approved.discard)(name)

    @rule(name=name_of)
    def revoke(self, name: str) -> None:
        if self.event.revoke(name) is not None:
            self.approved.discard(name)

    @rule(name=name_of, minutes=st.none() | st.floats(1, 60))
    def ask(self, name: str, minutes: float | None) -> None:
        if self.event.state != "open":
            with pytest.raises(EventError):
                self.event.ask(name, own(name), self.now, minutes)
            return
        receipt = self.event.ask(name, own(name), self.now, minutes)
        assert receipt == draw.receipt("K7Q", name, own(name))
        self.asked.add(name)

    @rule(name=name_of)
    def withdraw(self, name: str) -> None:
        if self.event.state == "open" and name in self.asked:
            self.event.withdraw(name)
            self.asked.discard(name)
        else:
            with pytest.raises(EventError):
                self.event.withdraw(name)

    @rule(
        used=st.dictionaries(name_of, st.floats(0, 1e6)), quota=st.frozensets(name_of, max_size=2)
    )
    @precondition(lambda self: self.event.state == "open")
    def close(self, used: dict[str, float], quota: frozenset[str]) -> None:
        facts = {name: Facts(seconds, 1.0, len(name)) for name, seconds in used.items()}
        self.event.close(self.now, "an admin", facts, quota)
        right = self.asked & self.approved - quota
        assert {e.member for e in self.event.entries} == right
        assert {s.member for s in self.event.struck_out} == self.asked - right
        self.at_close = (self.event.entries, self.event.struck_out, self.event.order)
        self.list_hash = self.event.list_hash
        assert self.event.due(self.now) == (self.event.settings.rule != "draw")
        assert self.event.due(self.now + PAUSE_S)

    @rule()
    @precondition(lambda self: self.event.state == "closed")
    def finish(self) -> None:
        again = Event(self.event.settings, SEED, "closed", {}, dict(self.event.requests), {},
                      *self.at_close)  # type: ignore[arg-type]  # fmt: skip
        outcomes = self.event.finish()
        assert again.finish() == outcomes  # a head that ended in between gives the same
        remaining = self.asked & {e.member for e in self.event.entries}
        assert {o.name for o in outcomes} == self.asked  # each request, and each once
        assert len(outcomes) == len(self.asked)
        counts = Counter(o.ended for o in outcomes)
        m, n, struck = len(self.asked), len(remaining), counts["struck-out"]
        assert m == n + struck
        assert counts["granted"] == min(n, self.event.settings.places)
        assert counts["not-drawn"] == n - counts["granted"]
        assert all(bool(o.reason) == (o.ended == "struck-out") for o in outcomes)
        assert sorted(o.rank for o in outcomes if o.rank) == list(range(1, n + 1))
        if self.event.settings.rule == "draw":
            proof = draw.verify(self.event.proof().text().encode(), self.event.commitment)
            assert proof.winners == self.event.winners

    @rule()
    @precondition(lambda self: self.event.state in ("open", "closed"))
    def cancel(self) -> None:
        self.event.cancel()
        assert all(self.event.outcomes[name].ended == "cancelled" for name in self.asked)
        with pytest.raises(EventError):
            self.event.finish()

    @invariant()
    def nobody_outside_the_set_is_granted(self) -> None:
        assert set(self.event.winners) <= self.asked
        assert set(self.event.winners) <= {e.member for e in self.event.entries}
        assert len(self.event.winners) <= self.event.settings.places

    @invariant()
    def the_list_never_changes(self) -> None:
        if self.event.state in ("closed", "done") and self.at_close:
            now = (self.event.entries, self.event.struck_out, self.event.order)
            assert now == self.at_close
            assert self.event.list_hash == self.list_hash


Life.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLife = Life.TestCase


def test_a_condition_closes() -> None:
    event = opened(
        conditions=(Condition("time", 2000.0), Condition("devices", 3), Condition("requests", 2))
    )
    assert event.settings.terms().closes == (
        "at 1970-01-01T00:33:20Z, or when 3 devices are free, or when 2 requests are there, or when an "
        "admin says so"
    )
    assert event.met(1999.0, 2) is None
    assert event.met(2000.0, 0) == Condition("time", 2000.0)
    assert event.met(1000.0, 3) == Condition("devices", 3)
    event.ask("ana", own("a"), 1.0)
    assert event.met(1000.0, 0) is None
    event.ask("ben", own("b"), 1.0)
    assert event.met(1000.0, 0) == Condition("requests", 2)
    event.close(1000.0, "2 requests")
    assert event.met(3000.0, 9) is None


def test_what_is_refused_says_why() -> None:
    event = opened(approval="hand", capacity=1)
    event.enrol("ana", True, 1.0)
    with pytest.raises(EventError, match="is full: 1 are enrolled"):
        event.enrol("ben", True, 1.0)
    with pytest.raises(EventError, match="a name has a-z"):
        event.ask("<b>Ana</b>", own("a"), 1.0)
    with pytest.raises(EventError, match="32 digits of 0-9a-f"):
        event.ask("ana", "xyz", 1.0)
    with pytest.raises(EventError, match="at most 60"):
        event.ask("ana", own("a"), 1.0, 61)
    event.ask("ana", own("a"), 1.0)
    event.ask("ben", own("b"), 1.0)
    event.close(2.0, "an admin")
    assert [(s.member, s.reason) for s in event.struck_out] == [
        ("ana", "not-approved"),
        ("ben", "not-enrolled"),
    ]
    event.finish()
    assert event.winners == []


FACTS = st.builds(Facts, st.floats(0, 1e6), st.floats(0.1, 9), st.integers(-2, 2))
ASKED = st.dictionaries(name_of, st.builds(Asked, st.floats(0, 1e5), st.floats(1, 1e4), FACTS))


@given(ASKED, st.sampled_from(rules.RULES[1:]))
def test_rules_order_everybody_once(asked: dict[str, Asked], chosen: rules.Rule) -> None:
    found = rules.order(chosen, asked, 2e5)
    assert sorted(found) == sorted(asked)
    assert found == rules.order(chosen, dict(reversed(asked.items())), 2e5)


def test_what_each_rule_prefers() -> None:
    asked = {
        "first": Asked(1.0, 100.0, Facts(900.0, 1.0, 0)),
        "short": Asked(2.0, 10.0, Facts(800.0, 1.0, 0)),
        "modest": Asked(3.0, 100.0, Facts(10.0, 1.0, 0)),
        "urgent": Asked(4.0, 100.0, Facts(950.0, 1.0, 2)),
    }
    first = {rule: rules.order(rule, asked, 5.0)[0] for rule in rules.RULES[1:]}
    assert first == {
        "first-come": "first", "least-waiting": "short", "fair-share": "modest", "priority": "urgent"
    }  # fmt: skip
    assert rules.order("priority", asked, 3 * 3600.0 + 1)[0] == "urgent"
    aged = {"old": Asked(0.0, 1.0, Facts()), "new": Asked(3 * 3600.0, 1.0, Facts(priority=2))}
    assert rules.order("priority", aged, 3 * 3600.0)[0] == "old"


def test_a_condition_of_one_is_singular() -> None:
    assert Condition("requests", 1).text() == "when 1 request is there"
    assert Condition("devices", 1).text() == "when 1 device is free"
