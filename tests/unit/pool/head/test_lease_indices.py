"""The lease table answers as one without indices does, after any history; and it does not scan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.pool.access.codes import Quota
from shoal.pool.head.leases import SESSIONS_MAX, Held, LeaseRefused, LeaseTable, Request, Share
from shoal.pool.head.table.owned import Quotas
from tests.unit.pool.head.scanning_table import ScanningTable

QUOTAS = {"bob": Quota(devices=3), "eve": Quota(memory_bytes=150)}
KINDS = ("cpu", "NVIDIA A100")


class Beside(RuleBasedStateMachine):
    """Does everything to both tables and compares what they say."""

    def __init__(self) -> None:
        super().__init__()
        self.indexed = LeaseTable(quotas=Quotas(QUOTAS))
        self.scanning = ScanningTable(quotas=dict(QUOTAS))
        self.leases: list[int] = []

    def both(self, act: Callable[[Any], Any]) -> Any:
        found = []
        for table in (self.indexed, self.scanning):
            try:
                found.append(act(table))
            except LeaseRefused as refused:
                found.append(str(refused))
        assert found[0] == found[1]
        return found[0]

    @rule(
        number=st.integers(0, 7), memory=st.sampled_from([60, 100]), kind=st.sampled_from(KINDS),
        context=st.sampled_from([0, 7]), elastic=st.booleans(),
    )  # fmt: skip
    def add(self, number: int, memory: int, kind: str, context: int, elastic: bool) -> None:
        if self.indexed.booked_bytes(number) or self.indexed.sessions(number):
            return  # a device that is back is as large as before
        node = f"n{number // 3}"
        self.both(
            lambda t: t.add_device(
                number, f"d{number}", memory, kind, node, context, elastic=elastic
            )
        )

    @rule(number=st.integers(0, 7))
    def absent(self, number: int) -> None:
        self.both(lambda t: t.absent(number))

    @rule(number=st.integers(0, 7))
    def remove(self, number: int) -> None:
        self.both(lambda t: t.remove_device(number))

    @rule(
        count=st.integers(-1, 4),
        memory=st.none() | st.integers(1, 110),
        fraction=st.none() | st.sampled_from([0.25, 1.0]),
        kind=st.sampled_from([None, None, "cpu", "a100|t4", "v100"]),
        client=st.sampled_from(["ana", "bob", "eve"]),
        only=st.none() | st.frozensets(st.integers(0, 8), max_size=5),
        key=st.sampled_from(["", "", "k0", "k1"]),
    )
    def grant(self, **asked: Any) -> None:
        request = Request(
            asked["count"], asked["memory"], asked["fraction"], asked["kind"], asked["client"],
            only=asked["only"], reservation=asked["key"],
        )  # fmt: skip
        assert self.indexed.could_ever(request) == self.scanning.could_ever(request)
        assert str(self.indexed.refusal(request)) == str(self.scanning.refusal(request))
        granted = self.both(lambda t: t.grant(request))
        if not isinstance(granted, str):
            self.leases.append(granted.lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.both(lambda t: t.release(lease))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), back=st.booleans())
    def suspend(self, data: st.DataObject, back: bool) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.both(lambda t: t.take_back(lease) if back else t.set_aside(lease))

    @rule(key=st.sampled_from(["k0", "k1"]), shares=st.dictionaries(
        st.integers(0, 7), st.integers(1, 60), max_size=3
    ))  # fmt: skip
    def reserve(self, key: str, shares: dict[int, int]) -> None:
        self.both(lambda t: t.reserve(key, shares))

    @rule(key=st.sampled_from(["k0", "k1"]))
    def unreserve(self, key: str) -> None:
        self.both(lambda t: t.unreserve(key))

    @rule(devices=st.sets(st.integers(0, 7), max_size=4), data=st.data())
    def reconcile(self, devices: set[int], data: st.DataObject) -> None:
        known = [
            Held(s.device, s.session, g.lease, g.epoch)
            for g in self.indexed.leases.values()
            for s in g.shares
        ]
        held = data.draw(st.lists(st.sampled_from(known), unique=True)) if known else []
        there = [h for h in held if h.device in devices]
        self.both(lambda t: t.reconcile(devices, there))

    @rule(device=st.integers(0, 7), session=st.integers(1, 6), epoch=st.integers(1, 12))
    def session_ended(self, device: int, session: int, epoch: int) -> None:
        self.both(lambda t: t.session_ended(device, session, epoch))

    @invariant()
    def they_agree(self) -> None:
        assert self.indexed.leases == self.scanning.leases
        assert self.indexed.offers() == self.scanning.offers()
        assert self.indexed.offers("k0") == self.scanning.offers("k0")
        for number in self.scanning.devices:
            assert self.indexed.reserved_bytes(number) == self.scanning.reserved_bytes(number)


Beside.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
TestBeside = Beside.TestCase


def nodes(count: int, devices: int = 2) -> LeaseTable:
    made = LeaseTable()
    for number in range(count * devices):
        made.add_device(number, f"d{number}", 2**40, "cpu", f"n{number // devices}")
    return made


def test_a_session_number_is_free_on_another_node() -> None:
    """One node holds as many sessions as there are numbers, and the pool as many times more."""
    leases = nodes(2)
    for device in (0, 2):
        for _ in range(SESSIONS_MAX):
            leases.grant(Request(1, 1, only=frozenset({device})))
    for node in ((0, 1), (2, 3)):
        numbers = [s.session for n in node for s in leases.shares_of(n)]
        assert sorted(numbers) == list(range(1, SESSIONS_MAX + 1))
    for full in ({0}, {1}, {1, 3}):
        with pytest.raises(LeaseRefused, match="session numbers of a node"):
            leases.grant(Request(len(full), 1, only=frozenset(full)))


def test_a_lease_over_two_nodes_has_a_number_that_is_free_on_both() -> None:
    leases = nodes(2)
    first = leases.grant(Request(1, 1, only=frozenset({0}))).shares[0].session
    other = leases.grant(Request(1, 1, only=frozenset({2}))).shares[0].session
    taken = frozenset(range(1, SESSIONS_MAX + 1)) - {first, other}
    with pytest.raises(LeaseRefused, match="session numbers"):
        leases.grant(Request(2, 1, avoid=taken, only=frozenset({1, 3})))
    last = leases.grant(Request(1, 1, avoid=taken, only=frozenset({1}))).shares[0]
    assert last == Share(1, other, 1)  # the node of device 1 has only `first`


def test_a_number_stays_taken_while_its_node_is_away() -> None:
    """A restarted head knows leases before it knows devices."""
    before = nodes(1)
    kept = before.grant(Request(1, 1, only=frozenset({1}))).shares[0].session
    after = LeaseTable()
    after.restore(before.leases.values(), before.epoch, kept, {0: "n0", 1: "n0"})
    after.add_device(0, "d0", 2**40, "cpu", "n0")  # device 1 is not back yet
    assert after.grant(Request(1, 1)).shares[0].session != kept


def test_a_grant_makes_only_the_offers_that_changed() -> None:
    made = 0

    class Watched(LeaseTable):
        def offer(self, number: int, key: str = "") -> Any:
            nonlocal made
            made += 1
            return LeaseTable.offer(self, number, key)

    leases = Watched()
    for number in range(4000):
        leases.add_device(number, f"d{number}", 100, "cpu", f"n{number // 8}")
    leases.grant(Request(1, 10))
    made = 0
    for _ in range(50):
        leases.release(leases.grant(Request(1, 10)).lease)
    assert made <= 150
