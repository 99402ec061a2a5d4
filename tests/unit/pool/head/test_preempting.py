"""The rule `priority` takes devices from tasks of a lower one: with a runner and device server that a
test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from shoal.pool.wire import admission_messages, runner_messages
from shoal.pool.wire.runner_messages import AttemptEnded
from tests.unit.pool.head.test_live_plan import Pool
from tests.unit.pool.head.test_task_lifecycle import ADMIN


def play(act: Callable[[Pool], Awaitable[None]], rule: str = "priority") -> None:
    async def run() -> None:
        pool = Pool(None, rule)
        pool.who = ADMIN
        pool.line = pool.runner(ADMIN)
        try:
            await act(pool)
        finally:
            await pool.close()

    asyncio.run(run())


async def codes(pool: Pool, key: str) -> list[str]:
    return [reason.code for reason in (await pool.task(ADMIN, key)).reasons]


def test_an_urgent_task_suspends_one_that_goes_on_after_it() -> None:
    async def act(pool: Pool) -> None:
        assert pool.line is not None
        a, b = await pool.add("a", priority="low"), await pool.add("b")
        await pool.start(a, b)
        urgent = await pool.add("urgent", priority="high")
        await pool.run_until(lambda: pool.state(urgent) == "starting")
        assert (pool.state(a), pool.state(b)) == ("suspended", "running")  # the least urgent
        assert pool.devices(urgent) == pool.devices(a)
        later = await pool.add("later", priority="low")
        await pool.start(urgent)
        why = await pool.ask(ADMIN, admission_messages.AskWhy("a"))
        assert why.state == "suspended"
        first = why.why.reasons[0]
        assert (first.code, first.numbers["tasks_ahead"]) == ("suspended", 1)
        assert "urgent-3" in first.text
        assert why.why.estimate is not None
        # Its devices go back to it, and not to a task that came later.
        pool.line.say(AttemptEnded(urgent, 1, 0))
        await pool.run_until(lambda: pool.state(a) == "running")
        assert pool.state(later) == "waiting"
        assert "busy" in await codes(pool, "later")

    play(act)


def test_equals_and_what_waited_longer_do_not_give_way() -> None:
    async def act(pool: Pool) -> None:
        a, b = await pool.add("a"), await pool.add("b", priority="high")
        await pool.start(a, b)
        same = await pool.add("same")
        await pool.until(lambda: pool.live._decided > 0)
        for _ in range(20):
            await asyncio.sleep(0.01)
            pool.obey()
        assert (pool.state(a), pool.state(b), pool.state(same)) == ("running", "running", "waiting")

    play(act)


def test_what_cannot_be_suspended_yields_or_is_named() -> None:
    async def act(pool: Pool) -> None:
        assert pool.line is not None
        pool.refuses = "shares"
        a = await pool.add("a", yields=True, priority="low")
        b = await pool.add("b", priority="low")
        await pool.start(a, b)
        urgent = await pool.add("urgent", priority="high")
        await pool.run_until(lambda: bool(pool.line and pool.line.of(runner_messages.StopAttempt)))
        assert pool.line.of(runner_messages.StopAttempt)[0].task == a
        assert pool.state(a) == "running"
        reasons = {r.code: r.text for r in (await pool.task(ADMIN, "urgent")).reasons}
        assert reasons["preempting"] == "a-1 of a lower priority makes room for it"
        assert "other programs map its memory" in reasons["cannot-suspend"]
        pool.line.say(AttemptEnded(a, 1, 75))
        pool.leases.pop(a)
        await pool.run_until(lambda: pool.state(urgent) == "starting")
        waits = await pool.task(ADMIN, "a")
        assert (waits.state, waits.attempt, waits.exit_code) == ("waiting", 1, 75)
        await pool.start(urgent)
        pool.line.say(AttemptEnded(urgent, 1, 0))
        await pool.until(lambda: pool.state(a) == "starting")

    play(act)


def test_other_rules_suspend_nothing() -> None:
    async def act(pool: Pool) -> None:
        a, b = await pool.add("a", priority="low"), await pool.add("b", priority="low")
        await pool.start(a, b)
        urgent = await pool.add("urgent", priority="high")
        for _ in range(20):
            await asyncio.sleep(0.01)
            pool.obey()
        assert pool.state(urgent) == "waiting"
        assert "cannot-suspend" not in await codes(pool, "urgent")

    play(act, "first-come")


def test_a_suspended_task_that_is_cancelled_leaves_the_line() -> None:
    async def act(pool: Pool) -> None:
        assert pool.line is not None
        a, b = await pool.add("a", priority="low"), await pool.add("b")
        await pool.start(a, b)
        urgent = await pool.add("urgent", priority="high")
        await pool.run_until(lambda: pool.state(a) == "suspended")
        await pool.until(lambda: pool.head.admitting.waits("a-1"))
        pool.line.say(AttemptEnded(a, 1, 0))
        await pool.until(lambda: not pool.head.admitting.knows("a-1"))
        await pool.start(urgent)
        pool.line.say(AttemptEnded(urgent, 1, 0))
        another = await pool.add("another")
        await pool.run_until(lambda: pool.state(another) == "starting")

    play(act)
