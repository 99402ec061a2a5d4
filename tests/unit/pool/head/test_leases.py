"""The lease table as a state machine: whatever happens in whatever order, its promises hold."""

from __future__ import annotations

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.pool.access.codes import Quota
from shoal.pool.head.leases import (
    SESSIONS_MAX,
    Granted,
    Held,
    LeaseRefused,
    LeaseTable,
    Request,
)
from shoal.pool.head.table.owned import Quotas

MEMORY = 1000
CLIENTS = ("ana", "bob", "eve")
QUOTAS = {"bob": Quota(devices=2), "eve": Quota(memory_bytes=700)}


class LeaseMachine(RuleBasedStateMachine):
    """Drives a table beside a model of its device servers and clients, with nodes that come and go.

    A node's device servers hold what they were told to hold, also while the head cannot hear them;
    what they must never do is to hold more than the device's memory once the head can.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(quotas=Quotas(QUOTAS))
        self.last_epoch = 0
        self.servers: dict[int, dict[int, Held]] = {}  # device -> session -> what its server holds
        self.memory: dict[Held, int] = {}  # in bytes
        self.absent: set[int] = set()
        self.known: dict[int, Granted] = {}  # what clients believe to hold, some of them wrongly
        self.ended: set[int] = set()

    # --- devices -----------------------------

    @rule(memory=st.integers(1, MEMORY))
    def add_device(self, memory: int) -> None:
        number = len(self.servers)
        if number < 5:
            self.servers[number] = {}
            self.table.add_device(number, f"d{number}", MEMORY, "cpu", f"n{number % 2}")

    @precondition(lambda self: self.servers)
    @rule(data=st.data())
    def node_falls_silent(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.servers)))
        self.table.absent(number)
        self.absent.add(number)

    @precondition(lambda self: self.absent)
    @rule(data=st.data(), restarted=st.booleans(), given_up=st.booleans())
    def node_returns(self, data: st.DataObject, restarted: bool, given_up: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.absent)))
        if given_up:
            self.note(self.table.remove_device(number))
        if restarted:
            self.servers[number] = {}
        self.absent.discard(number)
        self.table.add_device(number, f"d{number}", MEMORY, "cpu", f"n{number % 2}")
        late, lost = self.table.reconcile({number}, self.servers[number].values())
        for held in late:
            del self.servers[number][held.session]
        self.note(lost)

    @precondition(lambda self: set(self.servers) - self.absent)
    @rule(data=st.data())
    def device_server_dies(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(set(self.servers) - self.absent)))
        self.servers[number] = {}
        self.note(self.table.remove_device(number))
        self.table.add_device(number, f"d{number}", MEMORY, "cpu", f"n{number % 2}")

    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        held = [h for n, s in self.servers.items() if n not in self.absent for h in s.values()]
        if held:
            one = data.draw(st.sampled_from(held))
            del self.servers[one.device][one.session]
            self.note(self.table.session_ended(one.device, one.session, one.epoch))

    def note(self, lost: list) -> None:  # type: ignore[type-arg]
        self.ended |= {one.lease for one in lost if one.ended}

    # --- leases ------------------------------

    @rule(
        count=st.integers(-1, 4),
        memory=st.none() | st.integers(-5, MEMORY + 5),
        fraction=st.none() | st.floats(-0.1, 1.1),
        kind=st.sampled_from([None, None, "cpu", "a100|cpu", "a100", "|"]),
        client=st.sampled_from(CLIENTS),
        spare=st.integers(0, 3),
        avoid_most=st.booleans(),
    )
    def grant(
        self,
        count: int,
        memory: int | None,
        fraction: float | None,
        kind: str | None,
        client: str,
        spare: int,
        avoid_most: bool,
    ) -> None:
        # A client may still hold nearly all session numbers in tensors of older leases.
        avoid = range(1, SESSIONS_MAX + 1 - spare) if avoid_most else range(1, spare)
        before = copy.deepcopy(self.table)
        request = Request(count, memory, fraction, kind, client, None, frozenset(avoid))
        try:
            lease = self.table.grant(request)
        except LeaseRefused:
            assert self.table == before, "a refusal must change nothing"
            return
        assert len({s.device for s in lease.shares}) == len(lease.shares) == count
        assert lease.epoch > self.last_epoch
        self.last_epoch = lease.epoch
        for share in lease.shares:
            assert share.device not in self.absent, "nobody can tell its server"
            assert share.session not in avoid
            assert share.memory_bytes >= 1
            if memory is not None:
                assert share.memory_bytes == memory
            held = Held(share.device, share.session, lease.lease, lease.epoch)
            self.servers[share.device][share.session] = held
            self.memory[held] = share.memory_bytes
        self.known[lease.lease] = lease

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.known)))
        granted = self.table.release(lease)
        assert (granted is None) == (lease in self.ended)
        self.ended.add(lease)
        for share in granted.shares if granted else ():
            if share.device not in self.absent:  # a revocation reaches who can be reached
                self.servers[share.device].pop(share.session, None)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), client=st.sampled_from(CLIENTS), older=st.integers(0, 2))
    def come_back(self, data: st.DataObject, client: str, older: int) -> None:
        lease = data.draw(st.sampled_from(sorted(self.known)))
        held = self.known[lease]
        rightful = client == held.client and older == 0 and lease not in self.ended
        try:
            granted = self.table.resume(lease, held.epoch - older, client)
            assert rightful, "a late or foreign holder was let in"
            assert set(granted.shares) <= set(held.shares)
        except LeaseRefused:
            assert not rightful

    @rule()
    def head_restarts(self) -> None:
        """A new head knows leases and counters; devices come back one by one."""
        old = self.table
        self.table = LeaseTable(quotas=Quotas(QUOTAS))
        nodes = {number: f"n{number % 2}" for number in self.servers}
        self.table.restore(old.leases.values(), old.epoch, old.next_session, nodes)
        self.absent = set(self.servers)

    # --- promises ----------------------------

    @invariant()
    def sessions_are_held_once(self) -> None:
        for lease in self.table.leases.values():
            assert len({s.session for s in lease.shares}) == 1, "a lease is one address space"
        there = [
            (node, g.shares[0].session)
            for g in self.table.leases.values()
            for node in {f"n{s.device % 2}" for s in g.shares}
        ]
        assert len(there) == len(set(there)), "two sessions of a node have one number"
        sessions = [session for _, session in there]
        assert all(1 <= s <= SESSIONS_MAX for s in sessions)

    @invariant()
    def no_memory_is_leased_twice(self) -> None:
        for number in self.table.devices:
            assert self.table.booked_bytes(number) <= MEMORY
            assert 0 <= self.table.free_bytes(number) <= MEMORY
        for number, held in self.servers.items():
            if number not in self.absent:
                assert sum(self.memory[h] for h in held.values()) <= MEMORY

    @invariant()
    def servers_that_are_heard_hold_what_is_leased(self) -> None:
        for number, held in self.servers.items():
            if number in self.absent:
                continue
            leased = {
                Held(s.device, s.session, g.lease, g.epoch)
                for g in self.table.leases.values()
                for s in g.shares
                if s.device == number
            }
            assert leased == set(held.values())

    @invariant()
    def the_indices_say_what_the_leases_say(self) -> None:
        shares = [s for g in self.table.leases.values() for s in g.shares]
        for number in {*self.table.devices, *(s.device for s in shares)}:
            on_device = [s for s in shares if s.device == number]
            assert sorted(self.table.shares_of(number), key=lambda s: s.session) == sorted(
                on_device, key=lambda s: s.session
            )
            assert self.table.sessions(number) == len(on_device)
            assert self.table.booked_bytes(number) == sum(s.memory_bytes for s in on_device)
        for client in CLIENTS:
            held = [g for g in self.table.leases.values() if g.client == client]
            by_lease = sorted(self.table.held_by(client), key=lambda g: g.lease)
            assert by_lease == sorted(held, key=lambda g: g.lease)

    @invariant()
    def quotas_hold(self) -> None:
        for client, quota in QUOTAS.items():
            shares = [s for g in self.table.held_by(client) for s in g.shares]
            assert quota.devices is None or len(shares) <= quota.devices
            total = sum(s.memory_bytes for s in shares)
            assert quota.memory_bytes is None or total <= quota.memory_bytes

    @invariant()
    def a_lease_has_devices(self) -> None:
        assert all(g.shares for g in self.table.leases.values())
        assert not set(self.table.leases) & self.ended


LeaseMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestLeaseMachine = LeaseMachine.TestCase


def table(*memory: int) -> LeaseTable:
    made = LeaseTable()
    for number, amount in enumerate(memory):
        made.add_device(number, f"d{number}", amount)
    return made


def test_the_freest_devices_are_chosen_first() -> None:
    leases = table(100, 300, 200)
    for expected in (1, 2, 0):
        granted = leases.grant(Request(1, 10))
        assert [s.device for s in granted.shares] == [expected]


def test_a_lease_without_an_amount_takes_what_is_free() -> None:
    leases = table(100)
    leases.grant(Request(1, 30))
    assert leases.grant(Request()).shares[0].memory_bytes == 70
    with pytest.raises(LeaseRefused, match="0 B of 100 B free"):
        leases.grant(Request())


def test_every_session_but_the_first_costs_a_context() -> None:
    """The first one's is no part of what the device offers."""
    leases = LeaseTable()
    leases.add_device(0, "cuda:0", 100, context_bytes=7)
    first = leases.grant(Request(1, 40))
    assert leases.free_bytes(0) == 53
    second = leases.grant(Request(1, 40))
    assert leases.free_bytes(0) == 6
    with pytest.raises(LeaseRefused):
        leases.grant(Request(1, 7))
    for granted in (first, second):
        leases.release(granted.lease)
    assert leases.free_bytes(0) == 100


def test_a_lease_without_an_amount_takes_what_its_client_may_have() -> None:
    leases = table(100)
    leases.quotas["eve"] = Quota(memory_bytes=40)
    assert leases.grant(Request(client="eve")).shares[0].memory_bytes == 40
    with pytest.raises(LeaseRefused, match="eve may hold 40 B"):
        leases.grant(Request(1, 1, client="eve"))


def test_a_released_session_number_is_not_used_again_at_once() -> None:
    leases = table(100)
    first = leases.grant(Request(1, 10))
    leases.release(first.lease)
    assert leases.grant(Request(1, 10)).shares[0].session != first.shares[0].session


def test_a_lease_keeps_its_other_devices() -> None:
    leases = table(100, 100)
    lease = leases.grant(Request(2, 10))
    (lost,) = leases.remove_device(0)
    assert (lost.lease, lost.ended, len(lost.shares)) == (lease.lease, False, 1)
    (rest,) = leases.remove_device(1)
    assert rest.ended
    assert leases.release(lease.lease) is None


def test_the_end_of_an_older_session_with_the_same_number_is_not_ours() -> None:
    leases = table(100)
    share = leases.grant(Request(1, 10)).shares[0]
    assert leases.session_ended(0, share.session, epoch=0) == []
    assert len(leases.leases) == 1


def test_leases_end_in_time() -> None:
    leases = table(100)
    lease = leases.grant(Request(1, 10, until=5.0)).lease
    assert leases.expired(4.9) == []
    assert leases.expired(5.0) == [lease]


def test_refusals_say_what_there_is() -> None:
    with pytest.raises(LeaseRefused, match="the pool has 1"):
        table(100).grant(Request(2))
    with pytest.raises(LeaseRefused, match="101 B free was asked for"):
        table(100).grant(Request(1, 101))
    with pytest.raises(LeaseRefused, match="devices must be from 1 to 32 \\(got 33\\)"):
        table(*[100] * 40).grant(Request(33))
    with pytest.raises(LeaseRefused, match="at most 1"):
        table(100).grant(Request(1, fraction=1.5))


def test_a_refusal_gives_the_quota_beside_the_devices() -> None:
    leases = table(100, 100)
    leases.quotas["eve"] = Quota(devices=1)
    leases.grant(Request(1, 60, client="bob"))
    with pytest.raises(LeaseRefused) as caught:
        leases.grant(Request(2, 50, client="eve"))
    text = str(caught.value)
    assert "40 B of 100 B free; 1 session(s) hold the rest" in text
    assert "eve may hold 1 device(s) at once and would hold 2" in text
    assert "a larger quota" in text


def test_a_silent_node_is_a_reason() -> None:
    leases = table(100, 100)
    leases.absent(1)
    with pytest.raises(LeaseRefused) as caught:
        leases.grant(Request(2))
    assert f"{leases.devices[1].name}: its node does not answer" in caught.value.reasons
    assert any("shoal status" in remedy for remedy in caught.value.unblock)


def test_a_reservation_is_free_for_its_own_request_only() -> None:
    leases = table(100, 100)
    assert leases.reserve("task", {0: 80})
    assert not leases.reserve("other", {0: 30})  # and nothing of it is kept
    assert leases.reserved_bytes(0) == 80
    assert [o.free_bytes for o in leases.offers()] == [20, 100]
    assert [o.free_bytes for o in leases.offers("task")] == [100, 100]
    with pytest.raises(LeaseRefused):
        leases.grant(Request(1, 30, only=frozenset({0})))
    mine = leases.grant(Request(1, 80, only=frozenset({0}), reservation="task"))
    assert mine.shares[0].device == 0
    leases.unreserve("task")
    assert [o.free_bytes for o in leases.offers()] == [20, 100]


def test_a_quota_counts_for_the_owner() -> None:
    leases = table(100, 100, 100)
    leases.quotas["ana"] = Quota(devices=2)
    leases.grant(Request(1, 1, client="ana"))
    leases.grant(Request(1, 1, client="task-7", owner="ana"))
    with pytest.raises(LeaseRefused, match="quota of ana"):
        leases.grant(Request(1, 1, client="task-8", owner="ana"))
    assert len(leases.owned_by("ana")) == 2
    assert len(leases.held_by("ana")) == 1


def test_only_the_named_devices_are_chosen() -> None:
    leases = table(100, 50, 100)
    assert leases.grant(Request(only=frozenset({1}))).shares[0].device == 1
    with pytest.raises(LeaseRefused):
        leases.grant(Request(2, 10, only=frozenset({2})))


def elastic(*sizes: int) -> LeaseTable:
    made = LeaseTable()
    for number, size in enumerate(sizes):
        made.add_device(number, f"d{number}", size, elastic=True)
    return made


def test_two_that_name_no_memory_share_an_elastic_device() -> None:
    """Each books a floor and may grow to the whole device; one with an amount books all of it."""
    leases = elastic(100)
    shares = [leases.grant(Request()).shares[0] for _ in range(2)]
    assert [(s.memory_bytes, s.limit_bytes) for s in shares] == [(25, 100)] * 2
    fixed = leases.grant(Request(1, 50)).shares[0]
    assert (fixed.memory_bytes, fixed.limit_bytes) == (50, 0)
    with pytest.raises(LeaseRefused):
        leases.grant(Request())
    assert elastic(2**40).grant(Request()).shares[0].memory_bytes == 256 * 2**20


def test_an_owner_with_a_memory_quota_books_what_it_may_use() -> None:
    leases = elastic(100)
    leases.quotas["eve"] = Quota(memory_bytes=40)
    share = leases.grant(Request(client="eve")).shares[0]
    assert (share.memory_bytes, share.limit_bytes) == (40, 0)


def test_a_suspended_lease_gives_its_memory_and_gets_it_back() -> None:
    leases = table(100)
    first = leases.grant(Request(1, 70))
    leases.set_aside(first.lease)
    leases.set_aside(first.lease)
    second = leases.grant(Request(1, 60))
    assert leases.free_bytes(0) == 40
    assert not leases.take_back(first.lease)
    leases.release(second.lease)
    assert leases.take_back(first.lease)
    assert leases.take_back(first.lease)  # it is already
    assert leases.free_bytes(0) == 30
    leases.set_aside(first.lease)
    leases.release(first.lease)  # it ends while it is suspended
    assert leases.free_bytes(0) == 100
    assert not leases.take_back(first.lease)
