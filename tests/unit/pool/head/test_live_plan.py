"""The head carries out plans: with a planner, runner and device server that a test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.pool.base import limits
from shoal.pool.base.paths import host_id
from shoal.pool.head.leases import Granted
from shoal.pool.head.nodes import Node
from shoal.pool.head.store import Store
from shoal.pool.planner.rounds import Round
from shoal.pool.wire import (
    admission_messages,
    messages,
    node_messages,
    runner_messages,
    task_messages,
)
from shoal.pool.wire.profile_messages import OperatorUse, SessionProfile
from shoal.pool.wire.runner_messages import AttemptEnded, AttemptStarted
from shoal.schedule.formats.records import PlanFields, ViewFields
from shoal.tasks.rules import DEFAULT
from shoal.tasks.spec import Needs
from tests.unit.pool.head.test_task_lifecycle import ANA, Line, World

GIB = 2**30


class Planner:
    """Answers what a test wants; None: it is dead."""

    def __init__(self) -> None:
        self.pid: int | None = 1
        self.views: list[ViewFields] = []
        self.plan: Callable[[ViewFields], list[tuple[int, list[int]]]] | None = None
        self.memory: dict[str, Any] = {"clock": 7.0}

    def restore(self, memory: dict[str, Any]) -> None:
        self.memory = memory

    async def ensure(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def decide(self, view: ViewFields) -> Round:
        assert all(state.task.arrival_s <= view.now_s for state in view.tasks)
        self.views.append(view)
        await asyncio.sleep(0)
        if self.plan is None:
            return Round(PlanFields([]), "rule", "it ended")
        return Round(PlanFields(self.plan(view)), "planner")


class Pool(World):
    """Two unequal devices that suspend what they are told to, unless `refuses`."""

    def __init__(self, path: Path | None = None, rule: str = DEFAULT) -> None:
        super().__init__(path, rule)
        self.head.table.devices.clear()
        self.node = Node("node", Line(), "m", starting=False, heard=float("inf"))  # type: ignore[arg-type]
        self.head.nodes.nodes["node"] = self.node
        for number, (name, speed) in enumerate([("fast", 1.0), ("slow", 0.25)]):
            device = node_messages.NodeDevice(
                number, name, "cpu", "cpu", GIB, speed, 1, "", elastic=True
            )
            self.node.devices[number], self.node.numbers[number] = device, number
            self.head.table.add_device(number, name, GIB, "cpu", "node", elastic=True)
        self.planner = Planner()
        self.refuses = ""
        self.who = ANA
        planner: Any = self.planner if rule == DEFAULT else None
        self.head.tasks.plan(planner, self.head.nodes, self.head.reports)
        self.leases: dict[int, Granted] = {}  # by task
        self.line: Line | None = None

    @property
    def live(self) -> Any:
        return self.head.tasks.live

    async def add(self, key: str, memory_bytes: int | None = None, **more: object) -> int:
        """Submit a task, and return its number."""
        needs = Needs(memory_bytes=memory_bytes)
        fields = {"name": key, "needs": needs, "machine": host_id(), **more}
        made = await self.submit(self.who, key, **fields)
        return int(made.id.rpartition("-")[2])

    async def start(self, *numbers: int) -> None:
        """Let the programs of tasks start and lease their devices."""
        assert self.line is not None
        for number in numbers:
            await self.until(lambda n=number: n in self.orders())  # type: ignore[misc]
            order = self.orders()[number]
            self.line.say(AttemptStarted(number, order.attempt))
            ask = messages.AskLease(None, None, [], ticket=order.ticket)
            request = self.head.tasks.lifecycle.request_of(order.ticket, self.who, ask)
            granted = self.head.table.grant(request)
            self.head.tasks.lifecycle.leased(order.ticket, granted)
            self.leases[number] = granted
            self.report(number)
            await self.until(lambda n=number: self.state(n) == "running")  # type: ignore[misc]

    def orders(self) -> dict[int, Any]:
        assert self.line is not None
        return {o.task: o for o in self.line.of(runner_messages.StartAttempt)}

    def report(self, number: int, state: str = "running", **more: Any) -> None:
        granted = self.leases[number]
        use = OperatorUse("aten::mm", "float32", 300, 10**6, 10**9, 10**6)
        profile = SessionProfile(
            granted.shares[0].session, granted.epoch, state, operators=[use], **more
        )
        message = node_messages.NodeSessionProfile(granted.shares[0].device, profile)
        self.head.reports.hear(self.node, message)

    def obey(self) -> None:
        """Answer all orders to suspend and to go on, as a device server does."""
        sent, self.node.channel.sent = self.node.channel.sent, []  # type: ignore[union-attr]
        by_session = {g.shares[0].session: n for n, g in self.leases.items()}
        for one in sent:
            if isinstance(one, node_messages.NodeOrderSession):
                number = by_session[one.order.session]
                if one.order.suspend and self.refuses:
                    self.report(number, "refused", reason=self.refuses)
                else:
                    self.report(number, "suspended" if one.order.suspend else "running")

    async def run_until(self, condition: Callable[[], bool]) -> None:
        def obeyed() -> bool:
            self.obey()
            return condition()

        await self.until(obeyed)

    def state(self, number: int) -> str:  # type: ignore[override]
        return str(self.head.tasks.lifecycle.index.tasks[number].task.state)

    def devices(self, number: int) -> list[int]:
        return sorted(self.head.tasks.lifecycle.index.tasks[number].shares)


def play(act: Callable[[Pool], Awaitable[None]], path: Path | None = None) -> None:
    async def run() -> None:
        pool = Pool(path)
        pool.line = pool.runner(ANA)
        try:
            await pool.until(lambda: pool.head.admitting.admission.planning.until > 0)
            await act(pool)
        finally:
            await pool.close()

    asyncio.run(run())


def on(**places: str) -> Callable[[ViewFields], list[tuple[int, list[int]]]]:
    """Plan tasks by name on devices by speed: `on(a="0.25")`. Equal places share."""

    def plan(view: ViewFields) -> list[tuple[int, list[int]]]:
        groups: dict[int, list[int]] = {}
        for task in view.tasks:
            place = places.get(task.task.name.rpartition("-")[0])
            kinds = [k for k, kind in enumerate(view.kinds) if f" {place}/" in kind.name]
            if kinds:
                groups.setdefault(kinds[0], []).append(task.id)
        return sorted(groups.items())

    return plan


def test_tasks_start_where_the_plan_says() -> None:
    async def act(pool: Pool) -> None:
        pool.planner.plan = on(a="0.25", b="1")
        a, b = await pool.add("a"), await pool.add("b")
        await pool.start(a, b)
        assert (pool.devices(a), pool.devices(b)) == ([1], [0])
        assert pool.leases[a].shares[0].limit_bytes == GIB

    play(act)


def test_a_dead_planner_is_not_waited_for() -> None:
    async def act(pool: Pool) -> None:
        a, b, c = [await pool.add(name) for name in "abc"]
        await pool.start(a, b)
        assert pool.state(c) == "waiting"
        pool.planner.plan = on(c="1")  # it is back
        pool.live.wake()
        await pool.run_until(lambda: pool.state(c) == "starting")
        assert {pool.state(a), pool.state(b)} == {"running", "suspended"}

    play(act)


def test_a_task_is_suspended_for_another_and_goes_on_after_it() -> None:
    async def act(pool: Pool) -> None:
        pool.planner.plan = on(long="1")
        long = await pool.add("long")
        await pool.start(long)
        await pool.run_until(lambda: pool.state(long) == "running")
        free_bytes = pool.head.table.free_bytes(0)
        pool.planner.plan = on(short="1")
        short = await pool.add("short")
        await pool.run_until(lambda: pool.state(long) == "suspended")
        task = await pool.task(ANA, "long")
        assert [r.code for r in task.reasons] == ["suspended"]
        await pool.start(short)
        assert pool.head.table.free_bytes(0) == free_bytes  # the floor of one
        assert pool.line is not None
        assert pool.line.of(runner_messages.PauseAttempt)[-1].paused is True
        pool.planner.plan = on(long="1")
        pool.line.say(AttemptEnded(short, 1, 0))
        await pool.run_until(lambda: pool.state(long) == "running")
        assert pool.line.of(runner_messages.PauseAttempt)[-1].paused is False
        assert pool.head.table.free_bytes(0) == free_bytes

    play(act)


def test_suspended_tasks_go_on_without_a_planner() -> None:
    async def act(pool: Pool) -> None:
        pool.planner.plan = on(a="1")
        a = await pool.add("a")
        await pool.start(a)
        pool.planner.plan = on(b="1")
        b = await pool.add("b")
        await pool.run_until(lambda: pool.state(a) == "suspended")
        await pool.start(b)
        pool.planner.plan = None
        assert pool.line is not None
        pool.line.say(AttemptEnded(b, 1, 0))
        await pool.run_until(lambda: pool.state(a) == "running")

    play(act)


def test_what_cannot_be_suspended_is_named_and_not_picked_again() -> None:
    async def act(pool: Pool) -> None:
        pool.refuses = "shares"
        pool.planner.plan = on(a="1")
        a = await pool.add("a")
        await pool.start(a)
        pool.planner.plan = on(b="1")
        b = await pool.add("b")
        await pool.run_until(lambda: bool(pool.live.suspending.refusals()))
        assert pool.state(a) == "running"
        # The rule fills the other device, which the plan left idle.
        await pool.run_until(lambda: pool.state(b) == "starting")
        c = await pool.add("c")
        await pool.start(b)
        await pool.run_until(lambda: len(pool.planner.views) > 2)
        shown = {r.code: r.text for r in (await pool.task(ANA, "c")).reasons}
        assert shown["cannot-suspend"] == "a-1 cannot be suspended: other programs map its memory"
        assert a not in [t.id for t in pool.planner.views[-1].tasks]
        assert pool.state(c) == "waiting"

    play(act)


def test_two_tasks_share_a_device_when_the_plan_says_so() -> None:
    async def act(pool: Pool) -> None:
        pool.planner.plan = on(a="1", b="1")
        a = await pool.add("a")
        await pool.start(a)
        b = await pool.add("b")
        await pool.start(b)
        assert pool.devices(a) == pool.devices(b) == [0]

    play(act)


def test_programs_that_lease_nothing_share_by_what_they_booked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "UNUSED_S", 0.0)

    async def act(pool: Pool) -> None:
        pool.planner.plan = on()
        numbers = [await pool.add(f"t{n}", memory_bytes=GIB // 2) for n in range(5)]
        assert pool.line is not None
        for count in (2, 4):  # one on each device, then two
            await pool.until(lambda c=count: len(pool.orders()) == c)  # type: ignore[misc]
            for number in numbers[:count]:
                pool.line.say(AttemptStarted(number, 1))
        await pool.until(lambda: {pool.state(n) for n in numbers[:4]} == {"running"})
        assert pool.state(numbers[4]) == "waiting"  # there is no memory to book

    play(act)


def test_a_device_that_comes_is_used_at_once() -> None:
    async def act(pool: Pool) -> None:
        pool.planner.plan = on(a="1")
        pool.head.table.absent(0)
        pool.head.table.absent(1)
        pool.live.look()
        a = await pool.add("a")
        await asyncio.sleep(0.1)
        assert pool.state(a) == "waiting"
        back = pool.head.table.devices[0]
        pool.head.table.add_device(0, back.name, GIB, "cpu", "node", elastic=True)
        pool.head.changes.notify()
        async with asyncio.timeout(limits.ROUND_FULL_S / 2):
            await pool.start(a)

    play(act)


def test_the_first_measurement_of_a_task_asks_for_a_plan() -> None:
    """Not the next round's: a short task would wait a minute behind a long one that nobody knew."""

    async def act(pool: Pool) -> None:
        pool.planner.plan = on(a="0")
        a = await pool.add("a")
        await pool.start(a)
        pool.live.look()
        assert not pool.live.look()
        pool.report(a, task_type="conv", steps=10)
        assert pool.live.look()
        pool.report(a, task_type="conv", steps=20)
        assert not pool.live.look()

    play(act)


def test_a_task_that_could_not_start_tries_again() -> None:
    """The runner has as many attempts as it can report, for a moment."""

    async def act(pool: Pool) -> None:
        pool.planner.plan = on(a="1")
        plans = pool.head.tasks.plans
        plans._is_full = lambda runner: True  # type: ignore[method-assign]
        a = await pool.add("a")
        await pool.until(lambda: bool(pool.planner.views))
        assert pool.state(a) == "waiting"
        plans._is_full = lambda runner: False  # type: ignore[method-assign]
        await pool.start(a)

    play(act)


def test_a_new_head_knows_what_is_suspended(tmp_path: Path) -> None:
    async def suspend(pool: Pool) -> None:
        pool.planner.plan = on(a="1")
        a = await pool.add("a")
        await pool.start(a)
        lease = pool.leases[a]
        await pool.head.store.flushed(_add(pool, lease))
        pool.planner.plan = on(b="1")
        await pool.add("b")
        await pool.run_until(lambda: pool.state(a) == "suspended")
        await pool.head.store.flushed()

    play(suspend, tmp_path / "pool.db")
    store = Store(tmp_path / "pool.db")
    assert [s.granted.shares[0].device for s in store.leases()] == [0]
    store.close()

    async def again() -> None:
        pool = Pool(tmp_path / "pool.db")  # its runner is not back yet
        assert (pool.state(1), pool.state(2)) == ("suspended", "waiting")
        assert pool.head.table.booked_bytes(0) == 0
        pool.live.look()
        sent = pool.node.channel.sent  # type: ignore[union-attr]
        orders = [m.order for m in sent if isinstance(m, node_messages.NodeOrderSession)]
        assert [order.suspend for order in orders] == [True]  # once more, if it was not heard
        await pool.close()

    asyncio.run(again())


def test_a_new_head_knows_what_the_planner_has_learned(tmp_path: Path) -> None:
    """Types of tasks by name, their operators, and the policy's own memory with its clock."""
    known: dict[str, Any] = {}

    async def learn(pool: Pool) -> None:
        pool.planner.plan = on(a="1")
        a = await pool.add("a")
        await pool.start(a)
        pool.report(a, steps=20, task_type="kind-of-a", peak_bytes=1000)
        await pool.until(lambda: "kind-of-a" in pool.live.observing.knowledge.types)
        known["type"] = pool.live.observing.knowledge.types["kind-of-a"]
        known["base"] = pool.live._base
        pool.live.save()

    play(learn, tmp_path / "pool.db")

    async def again() -> None:
        pool = Pool(tmp_path / "pool.db")
        knowledge = pool.live.observing.knowledge
        assert knowledge.types == {"kind-of-a": known["type"]}
        entry = pool.head.tasks.lifecycle.index.tasks[1]
        assert pool.live.observing.type_of(entry) == "kind-of-a"
        assert (pool.planner.memory, pool.live._base) == ({"clock": 7.0}, known["base"])
        await pool.close()

    asyncio.run(again())


def test_an_estimate_goes_by_steps_and_by_earlier_runs() -> None:
    async def act(pool: Pool) -> None:
        assert pool.line is not None
        clock = pool.head.clock
        a, b = await pool.add("a", steps=1000), await pool.add("b", steps=1000)
        await pool.start(a, b)
        waits = await pool.add("waits")
        for number in (a, b):
            pool.report(number, steps=500, task_type="t")
        ends = pool.live.observing.ends_at
        entry = pool.head.tasks.lifecycle.index.tasks[a]
        await pool.until(lambda: ends(entry, clock.now()) is not None)
        pool.live.look()
        soon = await pool.ask(ANA, admission_messages.AskWhy("waits"))
        assert (
            soon.why.estimate.start - clock.now() < 600
        )  # half of the steps are done; not an hour
        begun = entry.task.attempt_at
        assert begun is not None
        assert ends(entry, begun + 10) == begun + 20
        pool.line.say(AttemptEnded(a, 1, 0))
        await pool.run_until(lambda: pool.state(waits) == "starting")
        pool.live.look()
        again = await pool.add("again", name="a")
        await pool.until(lambda: pool.head.admitting.waits("a-4"))
        assert pool.head.admitting.admission.waiting["a-4"].ask.probably_s is not None
        assert again == 4

    play(act)


def _add(pool: Pool, granted: Granted) -> Any:
    from shoal.pool.head.store import StoredLease

    return pool.head.store.add_lease(StoredLease(granted, "", "a", 0.0), pool.head.table)


@pytest.mark.parametrize("answers", [True, False])
def test_every_waiting_task_has_a_reason(answers: bool) -> None:
    async def act(pool: Pool) -> None:
        pool.planner.plan = (lambda _: []) if answers else None
        numbers = [await pool.add(f"t{n}") for n in range(5)]
        await pool.start(*numbers[:2])
        page = await pool.ask(ANA, task_messages.AskTasks())
        assert all(t.reasons for t in page.tasks if t.state in ("waiting", "starting"))

    play(act)
