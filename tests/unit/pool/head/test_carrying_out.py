"""From plans to orders, and what watching tasks teaches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.pool.planner.carrying_out import Placed, alone_again, orders
from shoal.pool.planner.facts import Knowledge
from shoal.pool.planner.watching import Sample, Watch
from shoal.pool.wire.profile_messages import OperatorUse, SessionProfile
from shoal.schedule.model.device_profile import DeviceProfile
from shoal.schedule.model.predictor import Predictor

KINDS = [[0, 1, 2], [3]]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[int, Placed], list[tuple[int, list[int]]]]:
    """Tasks on devices, and a plan that the checker would pass."""
    placed = {}
    for task in range(draw(st.integers(0, 6))):
        placed[task] = Placed((draw(st.integers(0, 3)),), draw(st.booleans()))
    plan: list[tuple[int, list[int]]] = []
    tasks = draw(st.permutations(range(10)))
    for kind, numbers in enumerate(KINDS):
        able = [t for t in tasks if t not in placed or placed[t].devices[0] in numbers]
        for _ in range(draw(st.integers(0, len(numbers)))):
            left = [t for t in able if all(t not in members for _, members in plan)]
            if left:
                plan.append((kind, left[: draw(st.integers(1, 2))]))
    return placed, plan


@given(worlds())
def test_orders_bring_the_pool_closer_to_the_plan(
    world: tuple[dict[int, Placed], list[tuple[int, list[int]]]],
) -> None:
    placed, plan = world
    wanted = {task: kind for kind, tasks in plan for task in tasks}
    groups = {task: set(tasks) for _, tasks in plan for task in tasks}
    found = orders(plan, KINDS, placed, {})
    for task in found.suspend:  # nobody is suspended for nothing
        assert placed[task].running
        assert any(set(placed[task].devices) <= set(KINDS[k]) for k, _ in plan)
    after = {t: p.devices for t, p in placed.items() if p.running and t not in found.suspend}
    clearing = {d for t in found.suspend for d in placed[t].devices}
    for task in found.resume:
        assert not placed[task].running
        after[task] = placed[task].devices
    for task, devices in found.start.items():
        assert task not in placed
        assert set(devices) <= set(KINDS[wanted[task]])
        after[task] = devices
    for task in [*found.start, *found.resume]:
        assert not clearing & set(after[task])
        others = {t for t, d in after.items() if set(d) & set(after[task])}
        assert others <= groups[task]


def test_a_suspended_task_goes_on_where_nobody_runs() -> None:
    placed = {1: Placed((0,), True), 2: Placed((0,), False), 3: Placed((1,), False)}
    assert alone_again(placed) == [3]
    assert alone_again({4: Placed((1,), False), 3: Placed((1,), False)}) == [3]


def test_a_new_task_does_not_wait_for_one_that_stays() -> None:
    placed = {1: Placed((0,), True)}
    assert orders([(0, [1]), (0, [2])], KINDS, placed, {}).start == {2: (1,)}


# --- watching --------------------------------------------------------------------------------------

FAST = DeviceProfile("fast", "f", 0, {"float32": 4e9}, 4e9, 0.0)


@pytest.fixture
def watch() -> Watch:
    made = Watch(Knowledge(Predictor([FAST])))
    for type_ in ("cnn", "gpt"):
        use = OperatorUse("aten::mm", "float32", 100, 10**6, 10**9, 10**6)
        report = SessionProfile(1, 1, "running", task_type=type_, steps=100, operators=[use])
        made.knowledge.learn(report)
        made.knowledge.alone(type_, FAST, 100, 2.0)
    return made


def look(watch: Watch, at: float, **steps: int) -> bool:
    members = dict(enumerate(sorted(steps)))
    samples = {n: Sample(at, type_, steps[type_]) for n, type_ in members.items()}
    return watch.look({7: frozenset(members)}, samples, {7: FAST})


def test_a_task_alone_is_measured(watch: Watch) -> None:
    look(watch, 0.0, cnn=0)
    look(watch, 4.0, cnn=400)  # too short
    assert watch.knowledge.predictor.predict(watch.knowledge.types["cnn"], FAST).steps_per_s == 50
    look(watch, 10.0, cnn=1000)
    speed = watch.knowledge.predictor.predict(watch.knowledge.types["cnn"], FAST).steps_per_s
    assert speed == pytest.approx(50 + 0.3 * 50)


def test_tasks_that_lose_by_sharing_are_found(watch: Watch) -> None:
    assert not look(watch, 0.0, cnn=0, gpt=0)
    assert not look(watch, 20.0, cnn=200, gpt=200)
    assert look(watch, 31.0, cnn=310, gpt=310)  # 10 of 50 steps a second, each
    assert watch.knowledge.pairs["fast", ("cnn", "gpt")] == (10.0, 10.0)
    assert not look(watch, 32.0, cnn=320, gpt=320)
    assert not look(watch, 63.0, cnn=3420, gpt=3420)  # 100 a second


def test_another_pair_is_another_measurement(watch: Watch) -> None:
    look(watch, 0.0, cnn=0, gpt=0)
    look(watch, 20.0, cnn=0)
    look(watch, 25.0, cnn=0, gpt=0)
    assert not look(watch, 40.0, cnn=1, gpt=1)
    assert not watch.knowledge.pairs
