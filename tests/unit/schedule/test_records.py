"""Views, plans and what policies remember survive being written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from tests.unit.schedule.schedule_worlds import worlds

from shoal.schedule.allocator.placement import place
from shoal.schedule.allocator.policy import Assignment, Plan, Policy, TaskState, View
from shoal.schedule.formats import records, views
from shoal.schedule.model.entities import InputError, Kind, Pool, Task
from shoal.schedule.model.throughputs import Throughputs
from shoal.schedule.policies.shoal import Shoal
from shoal.schedule.simulate.simulator import Simulation, check

GIB = 2**30


class Forgetful(Policy):
    """A planner that dies after every answer: each round is a new instance and a written view."""

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}
        self.name = "shoal"

    def decide(self, view: View) -> Plan:
        written = msgspec.json.encode(views.to_fields(view))
        again = views.from_fields(msgspec.json.decode(written, type=records.ViewFields))
        policy = Shoal()
        policy.restore(self.memory, again)
        plan = policy.decide(again)
        self.memory = records.as_json(policy.state())
        fields = msgspec.json.encode(views.plan_to_fields(plan))
        return views.plan_from_fields(msgspec.json.decode(fields, type=records.PlanFields))


@given(worlds())
@settings(max_examples=25, deadline=None)
def test_a_planner_that_dies_after_every_round_decides_the_same(
    world: tuple[Pool, Throughputs, list[Task]],
) -> None:
    pool, table, tasks = world
    one = Simulation(pool, table, tasks, Shoal(), 360.0, 20.0).run()
    other = Simulation(pool, table, tasks, Forgetful(), 360.0, 20.0).run()
    assert one.finishes_s.tolist() == other.finishes_s.tolist()


def a_view(unknown_shares: bool = False, memory_bytes: float = 0.0) -> View:
    table = Throughputs(
        ("t4",),
        [("a", 1), ("b", 1)],
        np.array([[2.0], [3.0]]),
        np.array([[memory_bytes], [1.0 * GIB]]),
        np.full((2, 1, 2), 0.1),
        unknown_shares=unknown_shares,
    )
    tasks = [TaskState(n, Task(f"job{n}", "ab"[n], 100.0, owner="eva"), n, 50.0) for n in (0, 1)]
    return View(0.0, 60.0, 5.0, Pool((Kind("t4", 1, 16 * GIB),), {"eva": 4}), table, tasks)


def test_tasks_of_unknown_memory_do_not_share_a_device() -> None:
    together = Plan((Assignment(0, (0, 1)),))
    check(a_view(unknown_shares=True), together)
    check(a_view(memory_bytes=GIB), together)
    with pytest.raises(AssertionError, match="memory"):
        check(a_view(), together)
    assert len(Shoal().decide(a_view()).assignments) == 1
    assert Shoal().decide(a_view(memory_bytes=GIB)).assignments == together.assignments


def test_a_tasks_own_restart_cost_counts() -> None:
    """It is not worth moving what takes longer to move than the round gains."""
    table = Throughputs(("slow", "fast"), [("a", 1)], np.array([[1.0, 1.5]]))
    pool = Pool((Kind("slow", 1), Kind("fast", 1)))

    def kind_of(restart_cost_s: float | None) -> int:
        task = TaskState(0, Task("a", "a", 1000.0), 0, 900.0, 0, True, restart_cost_s)
        return Shoal().decide(View(100.0, 60.0, 5.0, pool, table, [task])).assignments[0].kind

    assert kind_of(None) == 1
    assert kind_of(55.0) == 0


def test_gangs_stay_in_a_node_of_an_unequal_pool() -> None:
    pool = Pool((Kind("t4", 5, nodes=(0, 1, 1, 1, 2)),))
    placement = place(pool, (Assignment(0, (7,)),), {7: 3}, {})
    assert placement == {7: (1, 2, 3)}


def a_record() -> records.Record:
    question = records.Question(3, "shoal", 0.3, views.to_fields(a_view()))
    return records.Record(1e9, question, records.PlanFields([(0, [1])]), "planner", {"1": [0]})


def test_record_files_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    records.write_records(path, [a_record(), a_record()])
    assert list(views.read_records(path)) == [a_record(), a_record()]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"row":1', '"row":9'),
        ('"steps_left":50.0', '"steps_left":-1'),
        ('"kinds":["t4"]', '"kinds":["v100"]'),
        ('"alone":[[2.0]', '"alone":[[-2.0]'),
        ('"id":1', '"id":0'),
        ('{"at"', '{"oops"'),
    ],
)
def test_a_broken_record_names_its_line(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "day.jsonl"
    records.write_records(path, [a_record(), a_record()])
    lines = path.read_text().splitlines()
    assert old in lines[1]
    path.write_text(f"{lines[0]}\n{lines[1].replace(old, new)}\n")
    with pytest.raises(InputError, match=r"day\.jsonl:2: record"):
        list(views.read_records(path))


def test_a_redacted_record_names_nobody_and_still_runs() -> None:
    names: dict[str, str] = {}
    record = records.redacted(a_record(), names)
    text = msgspec.json.encode(record)
    assert b"eva" not in text
    assert b"job" not in text
    assert records.redacted(a_record(), names) == record
    view = views.from_fields(record.question.view)
    check(view, Shoal().decide(view))
