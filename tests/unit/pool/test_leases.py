"""The lease table as a state machine: whatever is asked in whatever order, its promises hold."""

from __future__ import annotations

import copy

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from shoal.pool.leases import SESSIONS_MAX, Granted, LeaseRefused, LeaseTable

MEMORY = 1000


class LeaseMachine(RuleBasedStateMachine):
    """Drives a table beside the plain list of leases that were granted and not released."""

    granted: Bundle[int] = Bundle("granted")

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.held: dict[int, Granted] = {}
        self.last_epoch = 0
        self.next_device = 0

    @rule()
    def add_device(self) -> None:
        self.table.add_device(self.next_device, f"d{self.next_device}", MEMORY)
        self.next_device += 1

    @rule(number=st.integers(0, 5))
    def lose_device(self, number: int) -> None:
        self.table.remove_device(number)

    @rule(
        target=granted,
        count=st.integers(-1, 4),
        memory=st.none() | st.integers(-5, MEMORY + 5),
        spare=st.integers(0, 3),
        avoid_most=st.booleans(),
    )
    def grant(self, count: int, memory: int | None, spare: int, avoid_most: bool) -> int:
        # A client may still hold nearly all session numbers in tensors of older leases.
        avoid = set(range(1, SESSIONS_MAX + 1 - spare)) if avoid_most else set(range(1, spare))
        before = copy.deepcopy(self.table)
        try:
            lease = self.table.grant(count, memory, avoid)
        except LeaseRefused:
            assert self.table == before, "a refusal must change nothing"
            return 0
        assert len(lease.shares) == count
        assert len({s.device for s in lease.shares}) == count
        assert lease.epoch > self.last_epoch
        self.last_epoch = lease.epoch
        for share in lease.shares:
            assert share.session not in avoid
            assert share.memory_bytes >= 1
            assert share.memory_bytes == memory or memory is None
        self.held[lease.lease] = lease
        return lease.lease

    @rule(lease=granted)
    def release(self, lease: int) -> None:
        assert self.table.release(lease) == self.held.pop(lease, None)

    @rule()
    def release_unknown(self) -> None:
        assert self.table.release(-1) is None

    @invariant()
    def sessions_are_held_once(self) -> None:
        for lease in self.held.values():
            assert len({s.session for s in lease.shares}) == 1, "a lease is one address space"
        sessions = [g.shares[0].session for g in self.held.values()]
        assert len(sessions) == len(set(sessions))
        assert all(1 <= s <= SESSIONS_MAX for s in sessions)

    @invariant()
    def no_device_grants_more_than_it_has(self) -> None:
        for device in self.table.devices.values():
            assert sum(device.granted.values()) <= device.memory_bytes
            assert 0 <= device.free_bytes <= device.memory_bytes

    @invariant()
    def what_is_granted_is_what_is_held(self) -> None:
        held = {
            (s.device, s.session, s.memory_bytes)
            for g in self.held.values()
            for s in g.shares
            if s.device in self.table.devices
        }
        booked = {
            (d.number, session, memory)
            for d in self.table.devices.values()
            for session, memory in d.granted.items()
        }
        assert booked <= held
        # A device that was lost and came back under its number starts with nothing granted.
        assert {b for b in held if b[0] >= self.next_device} == set()


TestLeaseMachine = LeaseMachine.TestCase


def table(*memory: int) -> LeaseTable:
    made = LeaseTable()
    for number, amount in enumerate(memory):
        made.add_device(number, f"d{number}", amount)
    return made


def test_the_freest_devices_are_chosen_first() -> None:
    leases = table(100, 300, 200)
    assert [s.device for s in leases.grant(1, 10, set()).shares] == [1]
    assert [s.device for s in leases.grant(1, 10, set()).shares] == [2]
    assert [s.device for s in leases.grant(1, 10, set()).shares] == [0]


def test_a_lease_without_an_amount_takes_what_is_free() -> None:
    leases = table(100)
    leases.grant(1, 30, set())
    assert leases.grant(1, None, set()).shares[0].memory_bytes == 70
    with pytest.raises(LeaseRefused, match="0 of 100 bytes free"):
        leases.grant(1, None, set())


def test_a_released_session_number_is_not_used_again_at_once() -> None:
    leases = table(100)
    first = leases.grant(1, 10, set())
    leases.release(first.lease)
    assert leases.grant(1, 10, set()).shares[0].session != first.shares[0].session


def test_a_client_may_end_after_its_device_did() -> None:
    leases = table(100, 100)
    lease = leases.grant(2, 10, set())
    leases.remove_device(0)
    assert leases.release(lease.lease) == lease
    assert leases.devices[1].granted == {}


def test_refusals_say_what_there_is() -> None:
    with pytest.raises(LeaseRefused, match="the pool has 1"):
        table(100).grant(2, None, set())
    with pytest.raises(LeaseRefused, match="101 bytes"):
        table(100).grant(1, 101, set())
