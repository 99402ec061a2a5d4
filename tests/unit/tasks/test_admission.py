"""Admission: random events against its promises, and each rule against what it says of itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.tasks import explain_wait
from shoal.tasks.backfill import Room
from shoal.tasks.reasons import Code, Reason
from shoal.tasks.requests import (
    Capacity,
    Ended,
    Granted,
    Planned,
    Planning,
    Priority,
    Quota,
    Released,
    Tick,
)  # fmt: skip
from shoal.tasks.room import Needs
from shoal.tasks.rules import RULES, find
from tests.unit.tasks.driver import Pool, devices
from tests.unit.tasks.scanning import Scanning

OWNERS = ("ana", "ben", "eve")
HELD = Reason(Code.HELD, "its owner holds it")

needs = st.builds(
    Needs,
    devices=st.integers(1, 4),
    memory_bytes=st.one_of(st.none(), st.sampled_from([10, 40, 60, 100, 160])),
    kind=st.sampled_from([None, "cpu", "a100"]),
    alone=st.booleans(),
)
asks = st.fixed_dictionaries(
    {
        "owner": st.sampled_from(OWNERS),
        "needs": needs,
        "priority": st.sampled_from(list(Priority)),
        "limit_s": st.sampled_from([None, None, 5.0, 50.0]),
        "can_suspend": st.sampled_from([False, False, True]),
        "by_plan": st.booleans(),
    }
)
which = st.integers(0, 99)
events = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), asks, st.one_of(st.none(), st.integers(1, 30))),
        st.tuples(st.sampled_from(["ask again", "finish", "withdraw"]), which),
        st.tuples(st.sampled_from(["hold", "release", "lose"]), which),
        st.tuples(st.just("plan"), which, st.integers(0, 3)),
        st.tuples(st.just("planning"), st.integers(0, 900), st.integers(0, 4)),
        st.tuples(st.just("suspend"), which),
        st.tuples(st.just("time"), st.integers(1, 900)),
        st.tuples(st.just("device"), st.integers(0, 3), st.booleans()),
    ),
    max_size=40,
)  # fmt: skip


class Run:
    """Carries out random events, and checks after each what must always hold."""

    def __init__(self, rule: str) -> None:
        self.pool = Pool(rule, devices(100, 100, 50, 150))
        self.all = dict(self.pool.devices)
        self.asked: list[dict[str, Any]] = []
        self.pool.step(Quota("eve", 2, 120, weight=2.0))

    def do(self, event: tuple[Any, ...]) -> None:
        pool = self.pool
        waiting, holding = sorted(pool.admission.waiting), sorted(pool.booked)
        match event:
            case ("ask", fields, until):
                self.ask(fields, until)
            case ("ask again", number) if self.asked:
                self.ask(self.asked[number % len(self.asked)], None)
            case ("finish", number) if holding:
                pool.finish(of(number, holding))
            case ("lose", number) if holding:  # and what is admitted then does not get its devices
                name = of(number, holding)
                pool.end(name, "lost")
                del pool.booked[name]
                pool.step(Capacity(pool.offers()), refuse=True)
                pool.step(Ended(name), refuse=True)
            case ("withdraw", number) if waiting:
                pool.withdraw(of(number, waiting))
            case ("hold", number) if waiting:
                pool.hold(of(number, waiting), HELD)
            case ("release", number) if waiting:
                pool.step(Released(of(number, waiting)))
            case ("plan", number, device) if waiting:
                pool.step(Planned(of(number, waiting), (device, (device + 1) % 4)))
            case ("planning", seconds, device):
                idle = frozenset({device} & pool.devices.keys())
                pool.step(Planning(pool.now + seconds, idle))
            case ("suspend", number) if holding:
                name = of(number, holding)
                pool.booked[name] = {}
                pool.step(Granted(name, {}))
                pool.step(Capacity(pool.offers()))
            case ("time", seconds):
                pool.now += seconds
                pool.step(Tick())
            case ("device", number, there):
                self.set_device(number, there)
        self.check()

    def ask(self, fields: dict[str, Any], until: int | None) -> None:
        name = f"r{len(self.asked)}"
        self.asked.append(fields)
        self.pool.ask(name, **fields, until=None if until is None else self.pool.now + until)

    def set_device(self, number: int, there: bool) -> None:
        pool = self.pool
        if there:
            pool.devices[number] = self.all[number]
        else:
            pool.devices.pop(number, None)
            pool.step(Capacity((), (number,)))
            for name in [n for n, shares in pool.booked.items() if number in shares]:
                pool.end(name, "lost")
                del pool.booked[name]
                pool.step(Ended(name))
        pool.step(Capacity(pool.offers(), tuple(self.all.keys() - pool.devices.keys())))

    def check(self) -> None:
        pool = self.pool
        waiting, holding = set(pool.admission.waiting), set(pool.admission.holdings)
        names = {f"r{i}" for i in range(len(self.asked))}
        assert names == waiting | holding | pool.over.keys()  # none is lost …
        assert len(names) == len(waiting) + len(holding) + len(pool.over)  # … or in two places
        assert holding == pool.booked.keys()
        places = explain_wait.positions(pool.admission, pool.now)
        for name in waiting:
            found = explain_wait.reasons(pool.admission, name, pool.now, places[name])
            assert found, f"{name} waits without a reason"
            assert all(reason.text for reason in found)
            explain_wait.remedies(pool.admission, name, found, pool.now)
        eves = [pool.booked[n] for n in holding if pool.admission.holdings[n].ask.owner == "eve"]
        assert sum(len(shares) for shares in eves) <= 2
        assert sum(sum(shares.values()) for shares in eves) <= 120


def of(number: int, names: Sequence[str]) -> str:
    return names[number % len(names)]


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=25, deadline=None)
@given(events=events)
def test_whatever_happens(rule: str, events: list[tuple[Any, ...]]) -> None:
    runs = [Run(rule), Run(rule), Run(rule)]
    scanning = Scanning(find(rule))
    runs[2].pool.admission = scanning
    runs[2].pool.step(Capacity(runs[2].pool.offers()))
    runs[2].pool.step(Quota("eve", 2, 120, weight=2.0))
    for run in runs:
        for event in events:
            run.do(event)
    assert runs[0].pool.outputs == runs[1].pool.outputs  # the same inputs, the same outputs
    assert runs[0].pool.outputs == runs[2].pool.outputs  # the index changes no answer
    for name in runs[0].pool.admission.waiting:
        reasons = [explain_wait.reasons(run.pool.admission, name, run.pool.now) for run in runs]
        assert reasons[0] == reasons[2]


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=6, deadline=None)
@given(asked=st.lists(asks, min_size=1, max_size=10), seed=st.integers(0, 9))
def test_whatever_can_run_runs(rule: str, asked: list[dict[str, Any]], seed: int) -> None:
    """Nothing starves: while short requests keep coming, everything that fits starts."""
    pool, rng = Pool(rule, devices(100, 100)), random.Random(seed)
    for number, fields in enumerate(asked):
        pool.ask(f"r{number}", **fields)
    wanted = [
        n for n, w in pool.admission.waiting.items() if pool.admission.could_hold(w.ask.needs)
    ]
    for turn in range(100):
        pool.now += 1200.0
        pool.ask(f"short{turn}", "ben", needs=Needs(memory_bytes=60), expected_s=10.0)
        for name in list(pool.booked):
            if rng.random() < 0.7:
                pool.finish(name)
        pool.step(Tick())
    assert not [name for name in wanted if name not in pool.started]


# --- first-come ------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 3), st.integers(1, 20)),
        min_size=1,
        max_size=20,
    )
)
def test_first_come_is_exact(jobs: list[tuple[int, int, int]]) -> None:
    """Without limits, every start is that of a plain queue, computed by a reference."""
    pool = Pool("first-come", devices(10, 10, 10))
    jobs = sorted(jobs, key=lambda job: job[0])
    ends: dict[str, float] = {}
    pending = [(float(at), f"r{i}", count, last) for i, (at, count, last) in enumerate(jobs)]
    lasts = {name: last for _, name, _, last in pending}
    while pending or ends:
        at = min([p[0] for p in pending[:1]] + list(ends.values()))
        pool.now = at
        for name in sorted(n for n, end in ends.items() if end == at):
            del ends[name]
            pool.finish(name)
            ends.update({n: s + lasts[n] for n, s in pool.started.items() if n not in pool.over})
        while pending and pending[0][0] == at:
            _, name, count, _ = pending.pop(0)
            pool.ask(name, needs=Needs(count, 10, alone=True))
        ends = {n: pool.started[n] + lasts[n] for n in pool.booked}
    assert pool.started == reference(jobs, 3)


def reference(jobs: list[tuple[int, int, int]], count: int) -> dict[str, float]:
    """Strict order of arrival on `count` equal devices."""
    free_at, last_start, found = [0.0] * count, 0.0, {}
    for number, (at, devices_, lasts) in enumerate(jobs):
        free_at.sort()
        start = max(float(at), last_start, free_at[devices_ - 1])
        free_at[:devices_] = [start + lasts] * devices_
        found[f"r{number}"], last_start = start, start
    return found


def blocked_pool(**running: float) -> Pool:
    """One of two devices runs "old"; "big" waits for both."""
    pool = Pool("first-come", devices(10, 10))
    pool.ask("old", needs=Needs(1, 10), **running)
    pool.ask("big", needs=Needs(2, 10))
    assert list(pool.started) == ["old"]
    return pool


def test_backfill_ends_before_the_devices_are_needed() -> None:
    pool = blocked_pool(limit_s=100.0)
    pool.now = 10.0
    pool.ask("long", needs=Needs(1, 10), limit_s=91.0)
    pool.ask("unlimited", needs=Needs(1, 10))
    assert list(pool.started) == ["old"]
    codes = [r.code for r in explain_wait.reasons(pool.admission, "unlimited", pool.now)]
    assert codes == [Code.EARLIER, Code.KEPT_FREE, Code.NO_LIMIT]
    pool.ask("short", needs=Needs(1, 10), limit_s=90.0)
    assert list(pool.started) == ["old", "short"]
    pool.finish("short")
    pool.finish("old")
    assert list(pool.started) == ["old", "short", "big"]


def test_what_runs_without_a_limit_may_end_at_any_moment() -> None:
    pool = blocked_pool()
    pool.ask("short", needs=Needs(1, 10), limit_s=1.0)
    assert list(pool.started) == ["old"]  # "big" could start now, were "old" to end
    pool.ask("gives way", needs=Needs(1, 10), can_suspend=True)
    assert list(pool.started) == ["old", "gives way"]


def test_what_nobody_ahead_can_use_is_not_kept() -> None:
    pool = blocked_pool()
    extra = devices(10, 10, 50)[2]
    pool.devices[2] = extra
    pool.step(Capacity(pool.offers()))
    assert "big" in pool.started  # it needs two, and there are three
    pool = Pool("first-come", devices(10, 10) | {2: replace(extra, kind="a100")})
    pool.ask("old", needs=Needs(1, 10, kind="cpu"))
    pool.ask("big", needs=Needs(2, 10, kind="cpu"))
    pool.ask("other kind", needs=Needs(1, 10, kind="a100"))
    assert list(pool.started) == ["old", "other kind"]


# --- the others ------------------------------------------------------------------------------------


def order_of(rule: str, *requests: tuple[str, dict[str, Any]]) -> list[str]:
    """Return the order in which requests run that wait for one device, each asked 10 s later."""
    pool = Pool(rule, devices(10))
    pool.ask("first", needs=Needs(1, 10))
    for name, fields in requests:
        pool.now += 10.0
        pool.ask(name, **{"needs": Needs(1, 10), **fields})
    while pool.booked:
        pool.now += 10.0
        pool.finish(next(iter(pool.booked)))
    return list(pool.started)[1:]


def test_least_waiting_takes_the_shortest_work_first_and_ages() -> None:
    assert order_of(
        "least-waiting",
        ("long", {"expected_s": 1000.0}),
        ("unknown", {}),
        ("limit", {"limit_s": 500.0}),
        ("short", {"expected_s": 1.0}),
    ) == ["short", "limit", "long", "unknown"]
    pool = Pool("least-waiting", devices(10))
    pool.ask("first", needs=Needs(1, 10))
    pool.ask("long", needs=Needs(1, 10), expected_s=100.0)
    pool.now = 401.0  # four times its work
    pool.ask("short", needs=Needs(1, 10), expected_s=0.0)
    pool.finish("first")
    assert "long" in pool.started


def test_priority_ages() -> None:
    high, low = {"priority": Priority.HIGH}, {"priority": Priority.LOW}
    assert order_of("priority", ("low", low), ("normal", {}), ("high", high)) == [
        "high", "normal", "low",
    ]  # fmt: skip
    pool = Pool("priority", devices(10))
    pool.ask("first", needs=Needs(1, 10))
    pool.ask("low", needs=Needs(1, 10), priority=Priority.LOW)
    pool.now = 12 * 3600.0 + 1
    pool.ask("high", needs=Needs(1, 10), priority=Priority.HIGH)
    pool.finish("first")
    assert "low" in pool.started


def jain(amounts: Sequence[float]) -> float:
    return sum(amounts) ** 2 / (len(amounts) * sum(a * a for a in amounts))


def shares_of_owners(rule: str, weights: dict[str, float], seed: int) -> dict[str, float]:
    """Device seconds of each owner in an hour of a full pool. The first owner floods it."""
    pool, rng = Pool(rule, devices(*[10] * 8)), random.Random(seed)
    for owner, weight in weights.items():
        pool.step(Quota(owner, weight=weight))
    owner_of: dict[str, str] = {}
    ends: dict[str, float] = {}
    used = dict.fromkeys(weights, 0.0)
    for number, owner in enumerate(weights):
        for index in range(300 if number == 0 else 80):
            name = f"{owner}-{index}"
            owner_of[name] = owner
            pool.ask(name, owner, needs=Needs(1, 10))
    while pool.now < 1800.0:
        for name in pool.booked:
            ends.setdefault(name, pool.now + rng.uniform(10, 200))
        name = min(pool.booked, key=lambda n: ends[n])
        pool.now = max(pool.now, ends[name])
        used[owner_of[name]] += pool.now - pool.started[name]
        pool.finish(name)
    return used


@pytest.mark.parametrize("seed", range(3))
def test_fair_share_is_fair(seed: int) -> None:
    weights = {"flood": 1.0, "ana": 1.0, "ben": 2.0, "eve": 1.0}
    used = shares_of_owners("fair-share", weights, seed)
    assert jain([used[o] / w for o, w in weights.items()]) >= 0.95
    unfair = shares_of_owners("first-come", weights, seed)
    assert jain([unfair[o] / w for o, w in weights.items()]) < 0.7  # what it would be otherwise


def test_rules_are_found_by_name() -> None:
    assert {"least-waiting", "first-come", "fair-share", "priority"} == set(RULES)
    for name in RULES:
        assert find(name).name == name
        assert find(name).summary
    with pytest.raises(ValueError, match="least-waiting"):
        find("luck")


# --- beside a planner ------------------------------------------------------------------------------


def test_the_rule_leaves_tasks_to_the_planner_and_leases_to_itself() -> None:
    pool = Pool("least-waiting", devices(100, 100))
    pool.step(Planning(60.0))
    pool.ask("task", by_plan=True)
    pool.ask("lease", needs=Needs(memory_bytes=60))
    assert set(pool.started) == {"lease"}
    [reason] = explain_wait.reasons(pool.admission, "task", pool.now)
    assert reason.code is Code.PLACING
    pool.step(Planning(60.0, frozenset({1}), frozenset({"task"})))  # its place is not ready yet
    assert "task" not in pool.started
    pool.step(Planning(60.0, frozenset({1})))
    assert pool.admission.holdings["task"].shares_bytes.keys() == {1}
    pool.ask("late", by_plan=True, needs=Needs(memory_bytes=40))
    pool.now = 61.0
    pool.step(Tick())
    assert "late" in pool.started


def test_an_idle_device_is_filled_once() -> None:
    pool = Pool("least-waiting", devices(100))
    pool.step(Planning(60.0))
    for name in ("a", "b"):
        pool.ask(name, by_plan=True, needs=Needs(memory_bytes=40))
    pool.step(Planning(60.0, frozenset({0})))
    assert set(pool.started) == {"a"}
    pool.plan("b", 0)
    assert set(pool.started) == {"a", "b"}


def test_plans_do_not_keep_a_lease_waiting_for_ever() -> None:
    pool = Pool("first-come", devices(100))
    pool.step(Planning(60.0))
    pool.ask("a", by_plan=True, needs=Needs(memory_bytes=60))
    pool.plan("a", 0)
    pool.ask("lease", needs=Needs(memory_bytes=80))
    pool.ask("b", by_plan=True, needs=Needs(memory_bytes=30))
    pool.plan("b", 0)
    assert "b" not in pool.started
    pool.finish("a")
    assert "lease" in pool.started


def test_who_is_suspended_counts_for_no_quota() -> None:
    pool = Pool("least-waiting", devices(100, 100))
    pool.step(Quota("ana", devices=1))
    pool.ask("a", needs=Needs(memory_bytes=100))
    pool.ask("b", needs=Needs(memory_bytes=100))
    assert set(pool.started) == {"a"}
    pool.booked["a"] = {}
    pool.step(Granted("a", {}))
    pool.step(Capacity(pool.offers()))
    assert set(pool.started) == {"a", "b"}


# --- with many ------------------------------------------------------------------------------------


def test_requests_that_keep_devices_free_share_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests that wait long do not each look at each device: a round takes the head's loop."""
    looks = 0
    start = Room._start

    def counted(room: Room, *arguments: Any) -> float:
        nonlocal looks
        looks += 1
        return start(room, *arguments)

    pool = Pool("first-come", devices(*[100] * 300))
    for number in range(300):
        pool.ask(f"holder{number}", needs=Needs(1, 60))
    for number in range(30):
        pool.ask(f"large{number}", f"owner{number}", needs=Needs(4, 100))
    monkeypatch.setattr(Room, "_start", counted)
    pool.ask("small", needs=Needs(1, 10))
    assert 300 <= looks <= 2 * (300 + 30 * 4)  # two rounds; it was 30 * 300 for each
