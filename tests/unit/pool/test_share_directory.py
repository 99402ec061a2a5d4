"""The directory of shared memory as a state machine: who has what, in whatever order things happen."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.errors import ShareError
from shoal.pool.base import limits
from shoal.pool.node.shares import share_directory
from shoal.pool.node.shares.share_directory import (
    OWNER,
    Forget,
    Granted,
    Party,
    Publish,
    Revoke,
    ShareDirectory,
)
from shoal.pool.wire import share_messages

LAYOUT = share_messages.ShareLayout("float32", [4], [1], 0)
CLIENTS = ("ana", "bob")


def request(mode: share_messages.ShareMode = "read") -> share_messages.ShareCreate:
    return share_messages.ShareCreate("token", 16, mode, LAYOUT)


def party(client: str = "ana", lease: int = 1) -> Party:
    return Party(client, lease, lease, 1000 + lease)


class Shell:
    """Carries instructions out, as the share server does, and checks that each makes sense."""

    def __init__(self) -> None:
        self.holder: dict[str, int] = {}  # by share: what the control page says
        self.lines: dict[str, set[int]] = {}
        self.revoked: set[str] = set()
        self.told: dict[tuple[str, int], bool] = {}  # who waits: whether it was told the outcome

    def do(self, steps: list[share_directory.Instruction]) -> None:
        for step in steps:
            assert step.share not in self.revoked, "nothing follows a revocation"
            match step:
                case Publish(share, holder):
                    self.holder[share] = holder
                case Granted(share, number):
                    assert self.holder[share] == number, "the page says so before it is told"
                    self.told.pop((share, number), None)
                case Forget(share, number):
                    self.lines[share].remove(number)
                case Revoke(share, waiting):
                    self.revoked.add(share)
                    for number in waiting:
                        del self.told[share, number]


class ShareMachine(RuleBasedStateMachine):
    """Programs of two clients that share, open, wait, let go and die."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = ShareDirectory()
        self.shell = Shell()
        self.parties: dict[tuple[str, int], Party] = {}
        self.ever: set[tuple[str, int]] = set()
        self.count = 0

    def keys(self) -> list[tuple[str, int]]:
        return sorted(k for k in self.parties if k[0] not in self.shell.revoked)

    @precondition(lambda self: len(self.directory.shares) < 3)
    @rule(
        client=st.sampled_from(CLIENTS),
        mode=st.sampled_from(("read", "exclusive")),
        lease=st.integers(1, 6),
    )
    def create(self, client: str, mode: share_messages.ShareMode, lease: int) -> None:
        self.count += 1
        name = f"s{self.count}"
        owner = party(client, lease * 2 + CLIENTS.index(client))
        share = self.directory.create(name, f"secret {name}", f"{name} 1", owner, request(mode))
        self.parties[name, OWNER] = owner
        self.shell.lines[name] = {OWNER}
        self.shell.do([Publish(name, share.holder)])
        assert share.holder == (OWNER if mode == "exclusive" else 0)

    @precondition(lambda self: self.keys())
    @rule(data=st.data(), other=st.booleans(), right=st.sampled_from((True, True, True, False)))
    def open(self, data: st.DataObject, other: bool, right: bool) -> None:
        name, _ = data.draw(st.sampled_from(self.keys()))
        client = self.parties[name, OWNER].client
        client = CLIENTS[1 - CLIENTS.index(client)] if other else client
        secret = f"secret {name}" if right else "secret"
        allowed = right and self.parties[name, OWNER].client == client
        number = self.directory.shares[name].next_number
        opener = party(client, 100 + self.count)
        try:
            share, made = self.directory.open(name, secret, f"{name} {number}", opener)
        except ShareError:
            assert not allowed
            return
        assert allowed
        assert made.number == number
        assert (name, number) not in self.ever, "a worker of the one before may still be there"
        self.ever.add((name, number))
        self.parties[name, number] = opener
        self.shell.lines[name].add(number)
        assert share.info().readers.count(opener.pid) >= 1

    @precondition(lambda self: self.keys())
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        name, number = data.draw(st.sampled_from(self.keys()))
        share = self.directory.shares[name]
        refused = share.mode == "read" or number in share.waiting
        try:
            who, steps = self.directory.acquire(name, f"{name} {number}")
        except ShareError:
            assert refused
            return
        assert not refused
        assert who == number
        self.shell.told[name, number] = False
        self.shell.do(steps)

    @precondition(lambda self: self.keys())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name, number = data.draw(st.sampled_from(self.keys()))
        self.shell.told.pop((name, number), None)
        self.shell.do(self.directory.release(name, f"{name} {number}"))
        assert self.directory.shares[name].holder != number

    @precondition(lambda self: self.shell.told)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        name, number = data.draw(st.sampled_from(sorted(self.shell.told)))
        self.directory.give_up(name, number)
        del self.shell.told[name, number]

    @precondition(lambda self: self.keys())
    @rule(data=st.data(), says_so=st.booleans())
    def leave(self, data: st.DataObject, says_so: bool) -> None:
        name, number = data.draw(st.sampled_from(self.keys()))
        if number != OWNER:
            self.shell.told.pop((name, number), None)
        if says_so:
            self.shell.do(self.directory.end(name, f"{name} {number}"))
        else:
            self.shell.do(self.directory.left(name, number))
        del self.parties[name, number]
        assert self.directory.left(name, number) == []  # once is enough
        assert (name in self.shell.revoked) == (number == OWNER)

    @precondition(lambda self: self.keys())
    @rule(data=st.data())
    def lease_ends(self, data: st.DataObject) -> None:
        name, _ = data.draw(st.sampled_from(self.keys()))
        lease = self.parties[name, OWNER].lease
        self.shell.do(self.directory.lease_ended(lease, lease))
        for share, number in self.keys():
            assert number != OWNER or self.parties[share, number].lease != lease

    @invariant()
    def the_page_says_what_the_directory_knows(self) -> None:
        for name, share in self.directory.shares.items():
            assert name not in self.shell.revoked
            assert self.shell.holder[name] == share.holder
            assert self.shell.lines[name] == set(share.participants)
            assert set(share.participants) == {n for s, n in self.parties if s == name}

    @invariant()
    def one_at_a_time_and_nobody_is_forgotten(self) -> None:
        for name, share in self.directory.shares.items():
            assert OWNER in share.participants
            assert share.holder in (0, *share.participants)
            assert len(set(share.waiting)) == len(share.waiting)
            assert share.holder not in share.waiting
            assert share.holder != 0 or not share.waiting, "it is free and somebody waits"
            assert share.mode == "exclusive" or (share.holder == 0 and not share.waiting)
            assert set(share.waiting) == {n for s, n in self.shell.told if s == name}

    @invariant()
    def only_programs_of_its_owner_have_it(self) -> None:
        for share in self.directory.shares.values():
            assert {p.party.client for p in share.participants.values()} == {
                share.owner.party.client
            }
        listed = [i.share for client in CLIENTS for i in self.directory.of(client)]
        assert sorted(listed) == sorted(self.directory.shares)


ShareMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestShareMachine = ShareMachine.TestCase


def test_every_wrong_handle_gets_the_same_answer() -> None:
    directory = ShareDirectory()
    directory.create("id", "secret", "key", party("ana"), request())
    said = set()
    for share_id, secret, client in (
        ("id", "Secret", "ana"),
        ("id", "", "ana"),
        ("other", "secret", "ana"),
        ("", "", "ana"),
        ("id", "secret", "bob"),
    ):
        with pytest.raises(ShareError) as refused:
            directory.open(share_id, secret, "k", party(client))
        said.add(str(refused.value))
    assert len(said) == 1
    assert directory.shares["id"].participants.keys() == {OWNER}


def test_limits() -> None:
    directory = ShareDirectory()
    for i in range(limits.SHARES_PER_LEASE_MAX):
        directory.create(f"{i}", "s", "k", party(lease=1), request())
    with pytest.raises(ShareError, match="unshare"):
        directory.create("more", "s", "k", party(lease=1), request())
    directory.create("of another lease", "s", "k", party(lease=2), request())
    for i in range(limits.SHARE_PARTICIPANTS_MAX - 1):
        directory.open("0", "s", f"k{i}", party(lease=3))
    with pytest.raises(ShareError, match="limit"):
        directory.open("0", "s", "one more", party(lease=3))


def test_turns_come_in_the_order_of_asking() -> None:
    directory = ShareDirectory()
    directory.create("id", "s", "key 1", party(), request("exclusive"))
    for number in (2, 3, 4):
        directory.open("id", "s", f"key {number}", party(lease=number))
        assert directory.acquire("id", f"key {number}") == (number, [])
    assert directory.release("id", "key 1") == [Publish("id", 2), Granted("id", 2)]
    assert directory.release("id", "key 1") == []  # it has nothing to let go of
    assert directory.left("id", 3) == [Forget("id", 3)]
    # Who dies while it has the memory gives it back.
    assert directory.left("id", 2) == [Forget("id", 2), Publish("id", 4), Granted("id", 4)]
    assert directory.left("id", OWNER) == [Revoke("id", ())]
    with pytest.raises(ShareError):
        directory.release("id", "key 4")


def test_numbers_are_never_given_twice() -> None:
    directory = ShareDirectory()
    directory.create("id", "s", "key", party(), request())
    given = []
    for i in range(4):
        given += [directory.open("id", "s", f"{i} {j}", party())[1].number for j in range(2)]
        directory.left("id", given[-2])
    assert given == list(range(2, 10))
