"""Events at the head: guesses, a whole room, and a head that ends at any moment."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ProtocolError
from shoal.people import draw
from shoal.people.event import EventError
from shoal.pool.access import codes, screen_codes
from shoal.pool.base.clock import Clock
from shoal.pool.head.head import Head
from shoal.pool.head.session_ends import Client
from shoal.pool.head.store import Store, StoreError
from shoal.pool.wire import people_messages as people
from shoal.pool.wire import roles
from shoal.pool.wire.roles import Principal, Role

OWNER = roles.pool_owner()
MEMBERS = [roles.member(f"m{i}", Role.USER) for i in range(6)]


class World:
    """A head in this process, whose clock stands still unless a test moves it."""

    def __init__(self, path: Path | None = None) -> None:
        self.now = 1e9
        self.path = path
        self.start()

    def start(self) -> None:
        """Start the head, or start it again with what its store has."""
        clock = Clock(lambda: self.now, lambda: self.now)
        self.store = Store(self.path)
        self.head = Head("test", self.store, standing=True, clock=clock)

    async def ask(self, who: Principal, message: Any) -> Any:
        client = Client(None, who)  # type: ignore[arg-type]
        return await self.head.requests.answer(client, message)

    async def open(self, **more: Any) -> str:
        made = await self.ask(OWNER, people.OpenEvent("GPU hour", more.pop("places", 2), **more))
        return str(made.event)

    async def code(self, event: str) -> str:
        return str((await self.ask(OWNER, people.ShowScreen(event))).code)

    async def enter(self, event: str, who: Principal) -> str:
        await self.ask(who, people.Enrol(await self.code(event)))
        return str((await self.ask(who, people.AskPlace(event, "ab" * 16))).receipt)


def test_a_whole_room_enrols_while_somebody_guesses() -> None:
    """Wrong codes are never accepted, however many; right ones between them always are."""

    async def life() -> None:
        world = World()
        event = await world.open()
        chosen = random.Random(7)
        stranger = roles.guest("", "")
        wrong = entered = 0
        for number in range(2_000):
            guess = event + "".join(chosen.choices(codes.SYMBOLS, k=screen_codes.SLOT))
            code = guess + screen_codes._check_symbol(guess)
            with pytest.raises(ProtocolError, match="the code is wrong"):
                await world.ask(stranger, people.Enrol(code, "x"))
            wrong += 1
            if number % 20 == 0:
                right = await world.ask(stranger, people.Enrol(await world.code(event), "eva"))
                assert right.standing == "approved"
                entered += 1
        found = await world.ask(OWNER, people.ShowEvent(event))
        assert (found.wrong_codes, found.enrolled) == (wrong, entered)
        assert len({p.name for p in found.people}) == min(entered, 200)

    asyncio.run(life())


@pytest.mark.slow
def test_a_hundred_thousand_wrong_codes() -> None:
    async def life() -> None:
        world = World()
        event = await world.open()
        chosen = random.Random(8)
        for _ in range(100_000):
            guess = event + "".join(chosen.choices(codes.SYMBOLS, k=screen_codes.SLOT))
            with pytest.raises(ProtocolError):
                await world.ask(
                    roles.guest("", ""),
                    people.Enrol(guess + screen_codes._check_symbol(guess), "x"),
                )
        assert (await world.ask(MEMBERS[0], people.Enrol(await world.code(event)))).name == "m0"

    asyncio.run(life())


def test_an_old_code_is_no_wrong_guess() -> None:
    async def life() -> None:
        world = World()
        event = await world.open()
        shown = await world.code(event)
        world.now += 2 * 30
        with pytest.raises(ProtocolError, match="the screen shows another code by now"):
            await world.ask(MEMBERS[0], people.Enrol(shown))
        assert (await world.ask(OWNER, people.ShowEvent(event))).wrong_codes == 0

    asyncio.run(life())


@pytest.mark.parametrize("rule", ["draw", "first-come"])
def test_one_result_however_often_the_head_ends(tmp_path: Path, rule: str) -> None:
    """The head starts again after every step; receipts, list, seed and winners stay as they were."""

    async def life() -> None:
        world = World(tmp_path / "pool.db")
        event = await world.open(rule=rule)
        receipts = []
        for who in MEMBERS:
            receipts.append(await world.enter(event, who))
            world.start()
        outside = roles.member("outside", Role.USER)
        await world.ask(outside, people.AskPlace(event, "cd" * 16))
        opened = await world.ask(OWNER, people.ShowEvent(event))
        world.start()
        closed = await world.ask(OWNER, people.CloseEvent(event))
        world.start()
        assert (closed.requests, closed.remaining, closed.struck_out) == (7, 6, 1)
        if rule == "draw":
            with pytest.raises(EventError, match="closed"):
                await world.ask(outside, people.AskPlace(event, "ee" * 16))
        done = await world.ask(OWNER, people.DrawEvent(event))
        for _ in range(3):
            world.start()
            again = await world.ask(OWNER, people.DrawEvent(event))
            assert (again.winners, again.people) == (done.winners, done.people)
        assert len(done.winners) == 2
        [struck] = [p for p in done.people if p.ended == "struck-out"]
        assert (struck.name, struck.reason) == ("outside", "not-enrolled")
        assert done.commitment == opened.commitment
        if rule == "draw":
            assert closed.list_hash == done.list_hash
            proof = (await world.ask(OWNER, people.AskProof(event))).text
            draw.verify(proof.encode(), opened.commitment, receipts)
        else:
            assert done.winners == ["m0", "m1"]

    asyncio.run(life())


def test_what_the_disk_does_not_take_has_not_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    async def life() -> None:
        world = World()
        event = await world.open()
        await world.enter(event, MEMBERS[0])

        async def full(*_: object) -> None:
            raise StoreError("the disk is full")

        with monkeypatch.context() as broken:
            broken.setattr(world.store, "flushed", full)
            with pytest.raises(StoreError):
                await world.ask(OWNER, people.CloseEvent(event))
            with pytest.raises(StoreError):
                await world.ask(MEMBERS[1], people.Enrol(await world.code(event)))
        found = await world.ask(OWNER, people.ShowEvent(event))
        assert (found.state, found.enrolled) == ("open", 1)

    asyncio.run(life())


def test_a_condition_closes_and_a_draw_follows_its_list() -> None:
    async def life() -> None:
        world = World()
        event = await world.open(conditions=[people.EventCondition("requests", 2)])
        await world.enter(event, MEMBERS[0])
        await world.head.people.events._tick(event, world.now)
        assert (await world.ask(OWNER, people.ShowEvent(event))).state == "open"
        await world.enter(event, MEMBERS[1])
        await world.head.people.events._tick(event, world.now)
        closed = await world.ask(OWNER, people.ShowEvent(event))
        assert (closed.state, closed.closed_by) == ("closed", "when 2 requests are there")
        assert closed.list_hash
        assert not closed.seed
        world.now += 11
        await world.head.people.events._tick(event, world.now)
        done = await world.ask(OWNER, people.ShowEvent(event))
        assert done.state == "done"
        assert done.seed

    asyncio.run(life())


def test_who_holds_a_grant_is_struck_out() -> None:
    async def life() -> None:
        world = World()
        event = await world.open(places=1)
        await world.enter(event, MEMBERS[0])
        await world.ask(OWNER, people.DrawEvent(event))
        second = await world.open(places=1)
        await world.enter(second, MEMBERS[0])
        again = await world.ask(OWNER, people.DrawEvent(second))
        assert [p.reason for p in again.people] == ["has-a-grant"]

    asyncio.run(life())


def test_a_changed_audit_entry_is_found() -> None:
    store = Store(None)
    for number in range(20):
        store.write_audit(float(number), "ana", "test", f"entry {number}")
    whole = store.verify_audit()
    assert (whole.entries, whole.wrong) == (20, None)
    assert store.verify_audit(whole.last_hash).noted_found
    store.change(lambda db: db.execute("UPDATE audit SET detail = 'x' WHERE id = 7"), promise=True)  # type: ignore[arg-type, return-value]
    assert store.verify_audit().wrong == 7
