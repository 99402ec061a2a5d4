"""The planner's process: it decides, and the pool goes on when it is slow, wrong or dead."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from shoal.pool.planner.recorder import Recorder, lines_of
from shoal.pool.planner.rounds import Planner, Round
from shoal.schedule.allocator.policy import TaskState, View
from shoal.schedule.formats import plan_check, records, views
from shoal.schedule.model.entities import Pool, Task
from shoal.schedule.model.throughputs import Throughputs

PATIENT_S = 60.0  # CI has two slow cores


def a_view(now_s: float = 0.0, tasks: int = 3) -> records.ViewFields:
    table = Throughputs(("fast", "slow"), [("a", 1), ("b", 1)], np.array([[10.0, 1.0], [4.0, 3.0]]))
    states = [
        TaskState(n, Task(f"t{n}", "ab"[n % 2], 100.0), n % 2, 100.0 - n) for n in range(tasks)
    ]
    return views.to_fields(View(now_s, 60.0, 5.0, Pool.parse("fast:1,slow:1"), table, states))


def run(
    work: Callable[[Planner, Recorder], Awaitable[None]],
    recorder: Recorder | None = None,
    **options: object,
) -> None:
    async def go() -> None:
        kept = recorder or Recorder(None)
        planner = Planner(kept, answer_s=PATIENT_S, **options)  # type: ignore[arg-type]
        try:
            await work(planner, kept)
        finally:
            await planner.close()

    asyncio.run(go())


def test_the_policy_decides_in_its_own_process() -> None:
    async def work(planner: Planner, _: Recorder) -> None:
        found = await planner.decide(a_view())
        assert found.source == "planner"
        assert planner.pid not in (None, os.getpid())
        assert found.plan.bound is not None
        assert plan_check.problem(a_view(), found.plan) is None

    run(work)


def test_a_killed_planner_is_missed_for_one_round_at_most() -> None:
    async def work(planner: Planner, _: Recorder) -> None:
        first = await planner.decide(a_view())
        assert planner.pid is not None
        os.kill(planner.pid, signal.SIGKILL)
        second = await planner.decide(a_view(60.0))
        third = await planner.decide(a_view(120.0))
        assert {first.source, third.source} == {"planner"}
        assert sorted(second.plan.assignments) == sorted(first.plan.assignments)

    run(work)


LIAR = """
import sys, json
print(json.dumps({"number": 0, "plan": None}), flush=True)
for line in sys.stdin:
    number = json.loads(line)["number"]
    lie = [[0, [0]], [0, [1]]] if number == 1 else [[0, [99]]]
    print(json.dumps({"number": number, "plan": {"assignments": lie}}), flush=True)
"""
NONSENSE = "print('hello', flush=True)\nimport time; time.sleep(100)"
SILENT = """
import sys, json, time
print(json.dumps({"number": 0, "plan": None}), flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize(
    ("program", "why"),
    [(LIAR, "more than the 1 devices"), (NONSENSE, "makes no sense"), ("", "it ended")],
)
def test_a_planner_that_lies_is_not_believed(program: str, why: str) -> None:
    async def work(planner: Planner, _: Recorder) -> None:
        for number in range(2):
            found: Round = await planner.decide(a_view(60.0 * number))
            assert found.source != "planner"
            assert number > 0 or why in found.problem
            assert plan_check.problem(a_view(), found.plan) is None
            assert len(found.plan.assignments) == 2  # no device stays idle

    run(work, command=(sys.executable, "-c", program))


def test_a_planner_that_does_not_answer_holds_up_nobody() -> None:
    async def work(_: Planner, recorder: Recorder) -> None:
        planner = Planner(recorder, answer_s=0.2, command=(sys.executable, "-c", SILENT))
        start = time.monotonic()
        found = await planner.decide(a_view())
        again = await planner.decide(a_view(60.0))
        assert time.monotonic() - start < 20
        assert (found.source, again.source) == ("fill", "last")
        assert "did not answer within 0.2 s" in found.problem
        await planner.close()

    run(work)


def test_the_last_rounds_are_recorded_and_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"

    async def work(planner: Planner, _: Recorder) -> None:
        for number in range(3):
            await planner.decide(a_view(60.0 * number))

    run(work, Recorder(path))
    read = list(views.read_records(path))
    assert [record.question.view.now_s for record in read] == [0.0, 60.0, 120.0]
    assert read[1].question.memory  # what the policy remembered goes with the question
    recorder = Recorder(path, most=6)
    for _ in range(20):
        recorder.add(read[0])
    assert 3 <= len(list(lines_of(path))) <= 6


def test_a_full_disk_loses_records_and_nothing_else(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "missing" / "rounds.jsonl")

    async def work(planner: Planner, _: Recorder) -> None:
        assert (await planner.decide(a_view())).source == "planner"

    run(work, recorder)
