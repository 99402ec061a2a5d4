"""From a live pool to the view of its policy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.pool.planner.facts import Knowledge, LiveDevice, LiveTask, facts
from shoal.pool.wire.profile_messages import OperatorUse, SessionProfile
from shoal.schedule.formats import plan_check, views
from shoal.schedule.formats.records import PlanFields, Question, Record
from shoal.schedule.model.device_profile import DeviceProfile
from shoal.schedule.model.predictor import Predictor
from shoal.schedule.policies.shoal import Shoal
from shoal.schedule.simulate.replay import day

MiB, GIB = 2**20, 2**30
SLOW = DeviceProfile("slow", "s", 0, {"float32": 1e9}, 1e9, 0.0)
FAST = DeviceProfile("fast", "f", 0, {"float32": 4e9}, 4e9, 0.0)
DEVICES = [
    LiveDevice(3, "slow", "left", 4 * GIB, SLOW),
    LiveDevice(5, "fast", "left", 8 * GIB, FAST),
    LiveDevice(9, "slow", "right", 2 * GIB, SLOW),
]


def report(type_: str, steps: int = 100, peak_bytes: int = 512 * MiB) -> SessionProfile:
    use = OperatorUse("aten::mm", "float32", 3 * steps, 10**6, 10**7 * steps, 10**5 * steps)
    return SessionProfile(
        1, 1, "running", task_type=type_, steps=steps, peak_bytes=peak_bytes, operators=[use]
    )


@pytest.fixture
def knowledge() -> Knowledge:
    known = Knowledge(Predictor([SLOW, FAST]))
    for type_ in ("cnn", "gpt"):
        known.learn(report(type_))
        known.alone(type_, SLOW, steps=100, seconds=2.0)
    return known


def task(number: int, type_: str = "", **more: object) -> LiveTask:
    return replace(LiveTask(number, f"t{number}", "eva", 0.0, type=type_), **more)  # type: ignore[arg-type]


def test_devices_are_grouped_by_kind_with_their_nodes(knowledge: Knowledge) -> None:
    found = facts(0.0, DEVICES, [task(1)], knowledge, {})
    assert [(k.name, k.count, k.memory_bytes, k.nodes) for k in found.view.kinds] == [
        ("slow", 2, 2 * GIB, (0, 1)),
        ("fast", 1, 8 * GIB, (0,)),
    ]
    assert found.devices == ((3, 9), (5,))


def test_a_task_measured_on_one_kind_is_predicted_for_the_others(knowledge: Knowledge) -> None:
    table = facts(0.0, DEVICES, [task(1, "cnn")], knowledge, {}).view.table
    assert table.alone == [[50.0, 200.0]]
    assert table.memory_bytes[0][0] == int(512 * MiB * 1.1)


def test_known_tasks_may_share_and_unknown_ones_never(knowledge: Knowledge) -> None:
    tasks = [task(1, "cnn"), task(2, "gpt"), task(3)]
    view = facts(0.0, DEVICES, tasks, knowledge, {}).view
    assert plan_check.problem(view, PlanFields([(1, [1, 2])])) is None
    assert plan_check.problem(view, PlanFields([(1, [1, 3])])) is not None
    declared = [task(1, "cnn"), task(3, memory_bytes=GIB)]
    view = facts(0.0, DEVICES, declared, knowledge, {}).view
    assert plan_check.problem(view, PlanFields([(1, [1, 3])])) is not None  # speed not known


def test_a_pair_that_does_not_gain_is_undone(knowledge: Knowledge) -> None:
    few = [DEVICES[1]]
    tasks = [task(1, "cnn", steps_total=1e6), task(2, "gpt", steps_total=1e6)]

    def together() -> bool:
        view = views.from_fields(facts(0.0, few, tasks, knowledge, {}).view)
        return any(len(a.tasks) == 2 for a in Shoal().decide(view).assignments)

    assert knowledge.together("fast", [("cnn", 60 * 120.0), ("gpt", 60 * 130.0)], 60.0) == (
        pytest.approx(1.25)
    )
    assert together()
    for _ in range(12):
        gain = knowledge.together("fast", [("gpt", 60 * 60.0), ("cnn", 60 * 60.0)], 60.0)
    assert gain is not None
    assert gain < 1
    assert not together()


def test_a_moment_is_no_measurement(knowledge: Knowledge) -> None:
    assert knowledge.together("fast", [("cnn", 5.0), ("gpt", 5.0)], 1.0) is None
    assert not knowledge.pairs


def test_a_running_task_pays_for_its_memory_when_it_moves(knowledge: Knowledge) -> None:
    running = task(1, "cnn", kind="fast", started=True, steps_done=70, used_bytes=GIB)
    found = facts(9.0, DEVICES, [running], knowledge, {}, host_bytes_per_s=2**29).view.tasks[0]
    assert (found.kind, found.started, found.restart_cost_s) == (1, True, 4.0)
    assert found.steps_left == 70  # as much again, as nobody said how much
    declared = replace(running, steps_total=100)
    assert facts(9.0, DEVICES, [declared], knowledge, {}).view.tasks[0].steps_left == 30


def test_every_view_can_be_read_by_the_planner(knowledge: Knowledge) -> None:
    tasks = [task(1, "cnn"), task(2), task(3, "gpt", devices=2), task(4, kinds=frozenset(["fast"]))]
    view = facts(0.0, DEVICES, tasks, knowledge, {"eva": 2}).view
    plan = Shoal().decide(views.from_fields(view))
    assert plan_check.problem(view, views.plan_to_fields(plan)) is None
    assert plan_check.problem(view, plan_check.fill(view)) is None


def test_devices_that_cannot_be_decided_about_keep_their_kind(knowledge: Knowledge) -> None:
    """So all rounds of a day name the same kinds; the day has the most devices of each."""
    busy = [replace(device, free=device.number == 9) for device in DEVICES]
    tasks = [task(1, "cnn", steps_total=500.0), task(2, steps_total=9.0)]
    found = facts(0.0, busy, tasks, knowledge, {})
    assert [(k.name, k.count) for k in found.view.kinds] == [("slow", 1), ("fast", 0)]
    assert found.devices == ((9,), ())
    plan = views.plan_to_fields(Shoal().decide(views.from_fields(found.view)))
    assert plan_check.problem(found.view, plan) is None
    assert [kind for kind, _ in plan.assignments] == [0]
    started = [replace(tasks[0], kinds=frozenset(["slow"])), tasks[1]]
    rounds = [
        facts(0.0, DEVICES, tasks, knowledge, {}).view,
        facts(9.0, busy, started, knowledge, {}).view,
    ]
    written = [Record(0.0, Question(n, "shoal", 0.3, view), plan) for n, view in enumerate(rounds)]
    pool, _, trace = day(written)
    assert [(k.name, k.count) for k in pool.kinds] == [("slow", 2), ("fast", 1)]
    assert (trace[0].kinds, trace[0].steps) == (None, 500.0)
