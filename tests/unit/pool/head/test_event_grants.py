"""What an event grants is there: devices are kept for its winners as long as it promised."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.pool.access.codes import Quota
from shoal.pool.base.clock import Clock
from shoal.pool.head.head import Head
from shoal.pool.head.leases import Granted, LeaseRefused, LeaseTable, Request
from shoal.pool.head.session_ends import Client
from shoal.pool.head.store import Store
from shoal.pool.wire import messages, roles
from shoal.pool.wire import people_messages as people
from shoal.pool.wire.end_reasons import End, Why
from shoal.pool.wire.roles import Principal, Role

OWNER = roles.pool_owner()
MEMBERS = [roles.member(f"m{i}", Role.USER) for i in range(4)]
MEMORY = 100
_GIVEN_BACK = End(Why.GIVEN_BACK)


class World:
    """A head with devices of 100 bytes, whose clock stands still unless a test moves it."""

    def __init__(self, devices: int, path: Path | None = None) -> None:
        self.now = 1e9
        self.path = path
        self.devices = devices
        self.start()

    def start(self) -> None:
        """Start the head, or start it again; its devices are back a moment later."""
        clock = Clock(lambda: self.now, lambda: self.now)
        self.table = LeaseTable()
        for who in MEMBERS:  # who may hold only what an event grants
            self.table.quotas[who.name] = Quota(0, None)
        store = Store(self.path)
        self.head = Head("test", store, standing=True, clock=clock, table=self.table)
        self.grants = self.head.people.grants
        for number in range(self.devices):
            self.table.add_device(number, f"cpu/{number}", MEMORY, node="n")
        self.head.changes.notify()

    async def ask(self, who: Principal, message: Any) -> Any:
        client = Client(None, who)  # type: ignore[arg-type]
        return await self.head.requests.answer(client, message)

    async def grant(self, *winners: Principal, **more: Any) -> str:
        """Run an event that all who enter win."""
        opened = people.OpenEvent("GPU hour", len(winners), "first-come", **more)
        event = str((await self.ask(OWNER, opened)).event)
        for who in winners:
            code = (await self.ask(OWNER, people.ShowScreen(event))).code
            await self.ask(who, people.Enrol(code))
            await self.ask(who, people.AskPlace(event, "ab" * 16, more.get("minutes")))
        await self.ask(OWNER, people.CloseEvent(event))
        return event

    async def of(self, who: Principal, event: str) -> people.GrantInfo:
        found: people.GrantInfo = (await self.ask(who, people.ShowEvent(event))).mine.grant
        return found

    def lease(self, who: Principal, **asked: Any) -> Granted | None:
        ask = messages.AskLease(
            asked.get("devices"), asked.get("memory_bytes"), [], duration_s=asked.get("duration_s")
        )
        request = Request(ask.devices or 1, ask.memory_bytes, client=who.name)
        return self.grants.lease(request, ask)

    async def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.grants.expire(self.now)
        self.head.admitting.tick()
        for event in list(self.head.people.events._kept):
            await self.head.people.events._tick(event, self.now)


def test_a_winner_has_its_devices_although_others_want_them() -> None:
    async def life() -> None:
        world = World(2)
        event = await world.grant(MEMBERS[0], devices=1, minutes=10)
        grant = await world.of(MEMBERS[0], event)
        assert (grant.state, grant.until) == ("open", world.now + 600)
        assert len(grant.devices) == 1
        for _ in range(2):  # as often as it likes
            with pytest.raises(LeaseRefused):
                world.table.grant(Request(2, client="other"))
            lease = world.lease(MEMBERS[0])
            assert lease is not None
            assert lease.until == grant.until
            assert [world.table.devices[s.device].name for s in lease.shares] == grant.devices
            assert world.lease(MEMBERS[0]) is None  # it has all that was granted
            world.head._grant_over(lease.lease)
        assert world.lease(MEMBERS[1]) is None

    asyncio.run(life())


def test_a_grant_waits_for_devices_and_its_time_begins_with_them() -> None:
    async def life() -> None:
        world = World(1)
        busy = world.table.grant(Request(1, client="other"))
        event = await world.grant(MEMBERS[0], MEMBERS[1], minutes=10)
        for who in MEMBERS[:2]:
            waiting = await world.of(who, event)
            assert (waiting.state, waiting.until, waiting.devices) == ("waiting", None, [])
            assert waiting.reasons
        assert world.table.quotas["m0"] == Quota(0, None)
        await world.pass_time(3600)
        world.table.release(busy.lease)
        await world.pass_time(1)
        assert (await world.of(MEMBERS[0], event)).until == world.now + 600
        assert (await world.of(MEMBERS[1], event)).state == "waiting"
        lease = world.lease(MEMBERS[0])
        assert lease is not None
        await world.pass_time(600)  # then the other's hour begins
        assert lease.lease not in world.table.leases
        assert (await world.of(MEMBERS[0], event)).state == "over"
        assert (await world.of(MEMBERS[1], event)).state == "open"
        assert world.table.quotas["m0"] == Quota(0, None)
        assert world.table.quotas["m1"] == Quota(1, None)

    asyncio.run(life())


def test_a_grant_lasts_as_long_as_was_asked_for() -> None:
    """Who asks for less to go first under least-waiting does not get more."""

    async def life() -> None:
        world = World(1)
        event = str((await world.ask(OWNER, people.OpenEvent("t", 1, "least-waiting"))).event)
        code = (await world.ask(OWNER, people.ShowScreen(event))).code
        await world.ask(MEMBERS[0], people.Enrol(code))
        await world.ask(MEMBERS[0], people.AskPlace(event, "ab" * 16, 5))
        await world.ask(OWNER, people.CloseEvent(event))
        assert (await world.of(MEMBERS[0], event)).until == world.now + 300

    asyncio.run(life())


def test_a_grant_comes_on_top_of_a_quota() -> None:
    async def life() -> None:
        world = World(3)
        world.table.quotas["m0"] = Quota(1, 100)
        own = world.table.grant(Request(1, 50, client="m0"))
        await world.grant(MEMBERS[0], devices=2, memory_bytes=80, minutes=10)
        assert world.table.quotas["m0"] == Quota(3, 260)
        assert world.lease(MEMBERS[0], devices=2, memory_bytes=81) is None  # more than promised
        lease = world.lease(MEMBERS[0])
        assert lease is not None
        assert sorted(s.memory_bytes for s in lease.shares) == [80, 80]
        await world.pass_time(600)
        assert set(world.table.leases) == {own.lease}
        assert world.table.quotas["m0"] == Quota(1, 100)

    asyncio.run(life())


def test_a_device_that_is_kept_is_not_free() -> None:
    """An event that closes when devices are free does not count those of another's places."""

    async def life() -> None:
        world = World(2)
        world.table.absent(1)
        await world.grant(MEMBERS[0], minutes=10)
        conditions = [people.EventCondition("devices", 1)]
        event = (await world.ask(OWNER, people.OpenEvent("t", 1, "draw", conditions))).event
        await world.pass_time(1)
        assert (await world.ask(OWNER, people.ShowEvent(event))).state == "open"
        await world.pass_time(600)
        closed = await world.ask(OWNER, people.ShowEvent(event))
        assert (closed.state, closed.closed_by) == ("closed", "when 1 device is free")

    asyncio.run(life())


def test_parts_of_a_grant_may_be_leased_one_by_one() -> None:
    async def life() -> None:
        world = World(2)
        await world.grant(MEMBERS[0], devices=2, memory_bytes=100, minutes=10)
        first = world.lease(MEMBERS[0], devices=1, memory_bytes=60, duration_s=5)
        assert first is not None
        assert first.until == world.now + 5
        rest = world.lease(MEMBERS[0], devices=1)
        assert rest is not None
        assert rest.shares[0].device != first.shares[0].device
        third = world.lease(MEMBERS[0], memory_bytes=40)
        assert third is None or third.shares[0].memory_bytes == 40

    asyncio.run(life())


def test_a_revoked_winner_gives_back_what_was_kept() -> None:
    async def life() -> None:
        world = World(1)
        await world.grant(MEMBERS[0], minutes=10)
        lease = world.lease(MEMBERS[0])
        assert lease is not None
        world.head.people.revoke("m0")
        assert not world.table.leases
        assert world.table.quotas["m0"] == Quota(0, None)
        assert world.table.grant(Request(1, client="other")).shares

    asyncio.run(life())


def test_a_head_that_starts_again_keeps_what_was_granted(tmp_path: Path) -> None:
    async def life() -> None:
        world = World(2, tmp_path / "pool.db")
        busy = world.table.grant(Request(1, client="other"))
        event = await world.grant(MEMBERS[0], MEMBERS[1], minutes=10)
        states = {w.name: await world.of(w, event) for w in MEMBERS[:2]}
        assert sorted(s.state for s in states.values()) == ["open", "waiting"]
        world.now += 60
        world.start()  # the device of `other` is free now
        again = {w.name: await world.of(w, event) for w in MEMBERS[:2]}
        assert again["m0"] == states["m0"]  # neither longer nor on another device
        assert world.table.quotas["m0"] == Quota(1, None)
        await world.pass_time(1)
        assert (await world.of(MEMBERS[1], event)).state == "open"
        assert world.lease(MEMBERS[0]) is not None
        assert world.lease(MEMBERS[1]) is not None
        assert busy.lease
        world.now += 600
        world.start()
        assert (await world.of(MEMBERS[0], event)).state == "over"
        assert world.table.quotas["m0"] == Quota(0, None)

    asyncio.run(life())


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), st.integers(0, 3), st.integers(1, 2), st.integers(1, 100)),
        st.tuples(st.just("lease"), st.integers(0, 3), st.integers(1, 2), st.integers(1, 100)),
        st.tuples(st.just("other"), st.integers(1, 3), st.integers(1, 100)),
        st.tuples(st.just("end"), st.integers(0, 5)),
        st.tuples(st.just("time"), st.sampled_from([1, 30, 61])),
        st.tuples(st.just("away"), st.integers(0, 2)),
        st.tuples(st.just("back"), st.integers(0, 2)),
        st.tuples(st.just("revoke"), st.integers(0, 3)),
    ),
    max_size=25,
)


@settings(max_examples=100, deadline=None)
@given(_STEPS)
def test_whatever_happens_an_open_grant_can_be_used(steps: list[tuple[Any, ...]]) -> None:
    """Nobody gets more than was promised, and what is over keeps nothing."""
    asyncio.run(_live(World(3), steps))


async def _live(world: World, steps: list[tuple[Any, ...]]) -> None:
    revoked: set[str] = set()
    for step in steps:
        match step:
            case "grant", who, devices, memory_bytes if MEMBERS[who].name not in revoked:
                more = {"devices": devices, "memory_bytes": memory_bytes, "minutes": 1}
                await world.grant(MEMBERS[who], **more)
            case "lease", who, devices, memory_bytes:
                world.lease(MEMBERS[who], devices=devices, memory_bytes=memory_bytes)
            case "other", devices, memory_bytes:
                with contextlib.suppress(LeaseRefused):
                    world.table.grant(Request(devices, memory_bytes, client="other"))
            case "end", nth if world.table.leases:
                lease = list(world.table.leases)[nth % len(world.table.leases)]
                world.head.ends.end_lease(lease, _GIVEN_BACK)
            case "time", seconds:
                await world.pass_time(seconds)
            case "away", number:
                world.table.absent(number)
            case "back", number:
                world.table.add_device(number, f"cpu/{number}", MEMORY, node="n")
                world.head.changes.notify()
            case "revoke", who:
                revoked.add(MEMBERS[who].name)
                world.head.people.revoke(MEMBERS[who].name)
        _check(world, revoked)
    await world.pass_time(3600)
    await world.pass_time(3600)
    for number in range(3):
        world.table.add_device(number, f"cpu/{number}", MEMORY, node="n")
    for lease in list(world.table.leases):
        world.head.ends.end_lease(lease, _GIVEN_BACK)
    for _ in range(30):  # those that waited have their minute now, one after the other
        await world.pass_time(61)
    assert all(world.table.free_bytes(number) == MEMORY for number in range(3))
    assert not world.grants._live
    assert not world.grants._of
    assert all(world.table.quotas[w.name] == Quota(0, None) for w in MEMBERS)


def _check(world: World, revoked: set[str]) -> None:
    table, live = world.table, list(world.grants._live.values())
    for number in table.devices:
        assert table.booked_bytes(number) + table.reserved_bytes(number) <= MEMORY
    for one in live:
        assert one.holder not in revoked
        leased = sum(s.memory_bytes for g in one.leases.values() for s in g.shares)
        assert leased <= sum(one.shares.values())
        if one.until is None:
            continue
        left = {n: b for n, b in one.left_bytes().items() if n in table.devices}
        for number, amount in left.items():
            assert table.free_bytes(number, one.request) >= amount
    for member in MEMBERS:
        held = sum(s.memory_bytes for g in table.owned_by(member.name) for s in g.shares)
        promised = sum(sum(o.shares.values()) for o in live if o.holder == member.name)
        assert held <= promised
