"""The tasks of a head without devices: whose tasks they are, keys, restarts, runners."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.pool.base import limits
from shoal.pool.base.paths import host_id
from shoal.pool.head.head import Head
from shoal.pool.head.session_ends import Client
from shoal.pool.head.store import Store
from shoal.pool.wire import messages, roles, runner_messages, task_messages
from shoal.pool.wire.roles import Principal, Role
from shoal.pool.wire.runner_messages import AttemptEnded, AttemptStarted, HeldAttempt, RunnerHello
from shoal.pool.wire.task_messages import TaskInfo
from shoal.tasks.rules import DEFAULT
from shoal.tasks.spec import Needs, TaskSpec

ANA, BEN = roles.member("ana", Role.USER), roles.member("ben", Role.USER)
ADMIN = roles.member("eva", Role.ADMIN)


class Line:
    """A connection that notes what the head sends, and says what a test wants."""

    is_local = True
    peer_pid = 0

    def __init__(self) -> None:
        self.sent: list[msgspec.Struct] = []
        self._said: asyncio.Queue[msgspec.Struct] = asyncio.Queue()

    def send(self, message: msgspec.Struct) -> None:
        self.sent.append(message)

    async def receive(self, kinds: object, timeout_s: float | None) -> msgspec.Struct:
        return await self._said.get()

    def say(self, message: msgspec.Struct) -> None:
        self._said.put_nowait(message)

    def abort(self) -> None:
        pass

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


class World:
    """A head with its loops, and one device."""

    def __init__(self, path: Path | None = None, rule: str = DEFAULT) -> None:
        self.head = Head("test", Store(path), standing=True, rule=rule)
        self.head.table.add_device(0, "gpu", 100, "cpu", "node")
        self.work = [asyncio.ensure_future(self.head.watch())]

    async def close(self) -> None:
        for one in self.work:
            one.cancel()
        await asyncio.gather(*self.work, return_exceptions=True)
        self.head.store.close()

    async def ask(self, who: Principal, request: msgspec.Struct) -> Any:
        return await self.head.requests.answer(Client(Line(), who), request)  # type: ignore[arg-type]

    async def submit(self, who: Principal, key: str = "k", **changes: object) -> Any:
        spec = TaskSpec(["true"], "/", name="t", needs=Needs(1, None, 10), machine=host_id())
        spec = msgspec.structs.replace(spec, **changes)
        answer = await self.ask(
            who, task_messages.SubmitTasks([task_messages.Submission(key, spec)])
        )
        return answer.tasks[0] if isinstance(answer, task_messages.TaskPage) else answer

    async def task(self, who: Principal, text: str) -> TaskInfo:
        page = await self.ask(who, task_messages.AskTasks([text]))
        return page.tasks[0]

    def runner(self, who: Principal, held: list[HeldAttempt] | None = None) -> Line:
        line = Line()
        hello = RunnerHello(f"{who.name}@here", host_id(), "", 1, held or [])
        serve = self.head.tasks.runners.serve(line, who.owner, hello, "test", 0)  # type: ignore[arg-type]
        self.work.append(asyncio.ensure_future(serve))
        return line

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.005)

    async def state(self, who: Principal, text: str, *states: str) -> TaskInfo:
        async with asyncio.timeout(30):
            while (found := await self.task(who, text)).state not in states:
                await asyncio.sleep(0.005)
        return found


def play(act: Callable[[World], Awaitable[None]], path: Path | None = None) -> None:
    async def run() -> None:
        world = World(path)
        try:
            await act(world)
        finally:
            await world.close()

    asyncio.run(run())


def test_other_users_see_name_owner_state_and_devices_only() -> None:
    async def act(world: World) -> None:
        made = await world.submit(ANA, environment={"TOKEN": "secret"}, after=[])
        seen = await world.task(BEN, made.id)
        shown = {n for n in TaskInfo.__struct_fields__ if getattr(seen, n) not in (None, [])}
        assert shown == {"id", "name", "owner", "state"}
        assert (await world.task(ADMIN, made.id)).key == "k"
        for request in (
            task_messages.ChangeTask(made.id, "cancel"),
            task_messages.ReadLog(made.id, None, 0),
            task_messages.AskFiles(made.id, ["**"]),
            task_messages.ReadFile(made.id, "x", 0),
            task_messages.WaitTask(made.id, 0.0),
        ):
            refused = await world.ask(BEN, request)
            assert isinstance(refused, messages.Refusal)
            assert refused.code == "not-yours"

    play(act)


def test_a_key_is_its_owners() -> None:
    async def act(world: World) -> None:
        first = await world.submit(ANA)
        assert (await world.submit(ANA)).id == first.id
        assert (await world.submit(BEN)).id != first.id
        refused = await world.submit(ANA, program=["false"])
        assert refused.code == "key-conflict"
        high = await world.submit(ANA, key="h", priority="high")
        assert high.code == "priority"
        assert (await world.submit(ADMIN, key="h", priority="high")).state == "waiting"

    play(act)


def test_a_refused_submission_leaves_nothing() -> None:
    async def act(world: World) -> None:
        spec = TaskSpec(["true"], "/", name="t")
        bad = msgspec.structs.replace(spec, after=["nobody"])
        pair = [task_messages.Submission("a", spec), task_messages.Submission("b", bad)]
        refused = await world.ask(ANA, task_messages.SubmitTasks(pair))
        assert refused.code == "no-such-task"
        assert (await world.ask(ANA, task_messages.AskTasks())).tasks == []
        assert (await world.submit(ANA, key="a", program=["other"])).state == "waiting"

    play(act)


def test_a_task_from_plan_to_end() -> None:
    async def act(world: World) -> None:
        made = await world.submit(ANA)
        assert [r.code for r in (await world.task(ANA, made.id)).reasons][:1] == ["no-runner"]
        line = world.runner(ANA)
        await world.until(lambda: bool(line.of(runner_messages.StartAttempt)))
        order = line.of(runner_messages.StartAttempt)[0]
        assert (order.attempt, order.spec.program, bool(order.ticket)) == (1, ["true"], True)
        assert world.head.table.free_bytes(0) == 90
        assert (await world.task(ANA, made.id)).devices == ["gpu"]
        line.say(AttemptStarted(order.task, 1))
        await world.state(ANA, made.id, "running")
        line.say(AttemptEnded(order.task, 1, 0))
        await world.state(ANA, made.id, "succeeded")
        await world.until(lambda: bool(line.of(runner_messages.EndNoted)))
        assert world.head.table.free_bytes(0) == 100

    play(act)


def test_a_device_that_comes_with_the_next_task_starts_the_first() -> None:
    """The head sees the device while it takes in another request: that must not lose the first."""

    async def act(world: World) -> None:
        del world.head.table.devices[0]
        line = world.runner(ANA)
        first = await world.submit(ANA, key="a")
        await world.until(lambda: world.head.admitting.waits(first.id))
        world.head.table.add_device(1, "late", 100, "cpu", "node")
        await world.submit(ANA, key="b")
        await world.until(lambda: len(line.of(runner_messages.StartAttempt)) == 2)

    play(act)


def test_nobody_takes_the_name_of_anothers_runner() -> None:
    async def act(world: World) -> None:
        line = Line()
        hello = RunnerHello("ana@here", host_id(), "", 1, [])
        await world.head.tasks.runners.serve(line, "ben", hello, "test", 0)  # type: ignore[arg-type]
        assert line.of(messages.Refusal)
        assert not world.head.tasks.runners.known

    play(act)


def test_another_owners_runner_gets_nothing() -> None:
    async def act(world: World) -> None:
        line = world.runner(BEN)
        made = await world.submit(ANA)
        other = await world.submit(BEN)
        await world.until(lambda: bool(line.of(runner_messages.StartAttempt)))
        assert [o.task_id for o in line.of(runner_messages.StartAttempt)] == [other.id]
        line.say(AttemptEnded(1, 1, 0))  # a lie about a task that is not its own
        line.say(AttemptEnded(2, 1, 0))
        await world.state(BEN, other.id, "succeeded")
        assert (await world.task(ANA, made.id)).state == "waiting"

    play(act)


@pytest.mark.parametrize("held", [True, False])
def test_a_head_that_restarts_while_a_task_runs(tmp_path: Path, held: bool) -> None:
    """The runner still has the attempt, and it goes on; or it has lost it, and the task waits."""
    path = tmp_path / "pool.db"

    async def before(world: World) -> None:
        await world.submit(ANA)
        line = world.runner(ANA)
        await world.until(lambda: bool(line.of(runner_messages.StartAttempt)))
        line.say(AttemptStarted(1, 1))
        await world.state(ANA, "t-1", "running")

    async def after(world: World) -> None:
        found = await world.task(ANA, "t-1")
        assert (found.state, found.devices) == ("running", ["gpu"])
        assert world.head.tasks.lifecycle.counts["tasks_submitted"] == 0
        line = world.runner(ANA, [HeldAttempt(1, 1, True)] if held else [])
        if held:
            line.say(AttemptEnded(1, 1, 3))
            assert (await world.state(ANA, "t-1", "failed")).exit_code == 3
        else:
            await world.until(lambda: bool(line.of(runner_messages.StartAttempt)))
            assert line.of(runner_messages.StartAttempt)[0].attempt == 2

    play(before, path)
    play(after, path)


def test_an_attempt_that_never_reached_its_runner_is_sent_again(tmp_path: Path) -> None:
    path = tmp_path / "pool.db"

    async def before(world: World) -> None:
        await world.submit(ANA)
        line = world.runner(ANA)
        await world.until(lambda: bool(line.of(runner_messages.StartAttempt)))

    async def after(world: World) -> None:
        line = world.runner(ANA)
        await world.until(lambda: bool(line.of(runner_messages.StartAttempt)))
        assert line.of(runner_messages.StartAttempt)[0].attempt == 1

    play(before, path)
    play(after, path)


def test_a_late_attempt_is_stopped() -> None:
    async def act(world: World) -> None:
        line = world.runner(ANA, [HeldAttempt(99, 1, True)])
        await world.until(lambda: bool(line.of(runner_messages.StopAttempt)))
        line.say(AttemptEnded(99, 1, 0))
        await world.until(lambda: bool(line.of(runner_messages.EndNoted)))

    play(act)


def test_a_stop_reaches_a_runner_that_was_away(tmp_path: Path) -> None:
    async def act(world: World) -> None:
        await world.submit(ANA)
        line = world.runner(ANA)
        await world.until(lambda: bool(line.of(runner_messages.StartAttempt)))
        world.work.pop().cancel()
        await world.ask(ANA, task_messages.ChangeTask("t-1", "cancel"))
        back = world.runner(ANA, [HeldAttempt(1, 1, True)])
        await world.until(lambda: bool(back.of(runner_messages.StopAttempt)))
        back.say(AttemptEnded(1, 1, 143))
        assert (await world.state(ANA, "t-1", "cancelled")).exit_code == 143

    play(act)


def test_tasks_that_ended_long_ago_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "head.db"

    async def before(world: World) -> None:
        for key in ("old", "new"):
            await world.submit(ANA, key=key)
            await world.ask(
                ANA, task_messages.ChangeTask(f"t-{1 if key == 'old' else 2}", "cancel")
            )
        await world.state(ANA, "t-2", "cancelled")
        await world.head.store.flushed()

    async def after(world: World) -> None:
        async with asyncio.timeout(30):
            while len((await world.ask(ANA, task_messages.AskTasks(None, 0, True))).tasks) > 1:
                await asyncio.sleep(0.005)
        kept = await world.ask(ANA, task_messages.AskTasks(None, 0, True))
        assert [task.key for task in kept.tasks] == ["new"]
        await world.head.store.flushed()

    play(before, path)
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        too_old_s = limits.TASKS_KEPT_DAYS * 86400 + 60
        db.execute("UPDATE tasks SET ended_at = ended_at - ? WHERE number = 1", (too_old_s,))
    play(after, path)
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT number FROM task_specs").fetchall() == [(2,)]
