"""What must hold for every policy, pool and trace."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schedule_worlds import views, worlds

from shoal.schedule.allocator.policy import View, policies
from shoal.schedule.model.entities import Kind, Pool, Task
from shoal.schedule.model.throughputs import Throughputs
from shoal.schedule.policies.shoal import Shoal
from shoal.schedule.simulate.bounds import bounds, completion_bound, makespan_bound
from shoal.schedule.simulate.simulator import Result, Simulation, check

NAMES = sorted(policies())
quick = settings(
    max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("name", NAMES)
@given(view=views())
@quick
def test_plan_respects_counts_memory_gangs_and_quotas(name: str, view: View) -> None:
    check(view, policies()[name]().decide(view))


@pytest.mark.parametrize("name", NAMES)
@given(view=views())
@quick
def test_same_input_same_plan(name: str, view: View) -> None:
    first = policies()[name]().decide(copy.deepcopy(view))
    again = policies()[name]().decide(copy.deepcopy(view))
    assert first == again


@given(view=views())
@quick
def test_shoal_reports_a_gap_to_a_bound_that_its_plan_does_not_pass(view: View) -> None:
    plan = Shoal().decide(view)
    assert plan.value is not None
    assert plan.bound is not None
    assert plan.value <= plan.bound * (1 + 1e-6)


@given(view=views())
@quick
def test_shoal_uses_the_room_it_has(view: View) -> None:
    """No task waits beside free devices that it could have alone."""
    plan = Shoal().decide(view)
    states = {state.id: state for state in view.tasks}
    running = {i for a in plan.assignments for i in a.tasks}
    for kind, place in enumerate(view.pool.kinds):
        used = sum(states[a.tasks[0]].task.devices for a in plan.assignments if a.kind == kind)
        for state in view.tasks:
            if state.id in running or not view.may_run(state, kind):
                continue
            held = sum(
                s.task.devices for i, s in states.items()
                if i in running and s.task.owner == state.task.owner
            )  # fmt: skip
            within = held + state.task.devices <= view.pool.quotas.get(state.task.owner, 10**9)
            assert state.task.devices > place.count - used or not within


def _runs(pool: Pool, table: Throughputs, tasks: list[Task], name: str, k: int) -> Result:
    return Simulation(pool, table, tasks, policies()[name](), 360.0, together_max=k).run()


@given(world=worlds(quotas=False), name=st.sampled_from(NAMES), together=st.integers(1, 3))
@settings(quick, max_examples=60)
def test_no_schedule_beats_the_bounds(
    world: tuple[Pool, Throughputs, list[Task]], name: str, together: int
) -> None:
    result = _runs(*world, name, together)
    known = bounds(*world, together)
    assert result.makespan_s >= known.makespan_s * (1 - 1e-6)
    assert result.completions_s.mean() >= known.average_completion_s * (1 - 1e-6)
    as_early_s = completion_bound(*world, together, result.makespan_s * (1 + 1e-6), intervals=8)
    assert as_early_s is not None
    assert result.completions_s.mean() >= as_early_s * (1 - 1e-6)


def test_completion_bound_is_close_where_the_best_schedule_is_known() -> None:
    """One device: shortest first."""
    table = Throughputs(("gpu",), [("lm", 1)], np.array([[1.0]]))
    tasks = [Task(f"t{n}", "lm", 1000.0 * n) for n in (1, 2, 3, 4)]
    best_s = (1000 + 3000 + 6000 + 10000) / 4
    bound_s = completion_bound(Pool.parse("gpu:1"), table, tasks)
    assert bound_s is not None
    assert 0.97 * best_s <= bound_s <= best_s


def test_no_schedule_ends_before_the_makespan_bound() -> None:
    table = Throughputs(("gpu",), [("lm", 1)], np.array([[1.0]]))
    tasks = [Task("a", "lm", 1000.0), Task("b", "lm", 1000.0)]
    assert completion_bound(Pool.parse("gpu:1"), table, tasks, latest_s=1900.0) is None
    assert completion_bound(Pool.parse("gpu:1"), table, tasks, latest_s=2000.0) is not None


def test_rounds_make_tasks_wait_for_their_start() -> None:
    table = Throughputs(("gpu",), [("lm", 1)], np.array([[1.0]]))
    tasks = [Task("a", "lm", 1000.0), Task("b", "lm", 1000.0, 100.0)]
    pool = Pool.parse("gpu:2")
    free_s = completion_bound(pool, table, tasks)
    rounds_s = completion_bound(pool, table, tasks, round_s=360.0)
    assert free_s == pytest.approx(1000.0, rel=1e-3)
    assert rounds_s == pytest.approx(1000.0 + 260.0 / 2, rel=1e-3)


@given(world=worlds(quotas=False), extra=st.integers(1, 3))
@settings(quick, max_examples=25)
def test_more_devices_never_make_a_bound_worse(
    world: tuple[Pool, Throughputs, list[Task]], extra: int
) -> None:
    pool, table, tasks = world
    first = pool.kinds[0]
    more = Pool((Kind(first.name, first.count + extra, first.memory_bytes), *pool.kinds[1:]))
    fewer_s, more_s = makespan_bound(pool, table, tasks), makespan_bound(more, table, tasks)
    assert more_s <= fewer_s * (1 + 1e-6)
    before, after = bounds(pool, table, tasks), bounds(more, table, tasks)
    # The grid of the completion bound follows the makespan, so it moves by a part of an interval.
    assert after.average_completion_s <= before.average_completion_s * 1.05


@given(world=worlds(), name=st.sampled_from(NAMES))
@settings(quick, max_examples=40)
def test_every_task_finishes_and_the_run_repeats(
    world: tuple[Pool, Throughputs, list[Task]], name: str
) -> None:
    first, again = _runs(*world, name, 2), _runs(*world, name, 2)
    assert np.isfinite(first.finishes_s).all()
    assert (first.completions_s > 0).all()
    assert first.utilisation <= 1 + 1e-9
    assert first.finishes_s.tolist() == again.finishes_s.tolist()


def _gang_in_a_stream(
    gang_s: float, short_s: float, every_s: float, count: int, balance: float
) -> tuple[float, float]:
    """A gang that needs the whole pool, among short tasks that leave it no gap. Fair ratio, finish."""
    table = Throughputs(
        ("gpu",), [("long", 4), ("short", 1)], np.array([[1.0], [1.0]]), busy=np.ones((2, 1, 2))
    )
    stream = [Task(f"s{n}", "short", short_s, every_s * n) for n in range(count)]
    gang = Task("gang", "long", gang_s, 0.0, devices=4)
    policy = Shoal(balance)
    run = Simulation(Pool.parse("gpu:4"), table, [gang, *stream], policy, 360.0, together_max=1)
    result = run.run()
    place = result.tasks.index(gang)
    return float(result.finish_ratios[place]), float(result.finishes_s[place])


@given(
    gang_s=st.sampled_from([1500.0, 4000.0]),
    short_s=st.sampled_from([700.0, 1000.0]),  # Just below whole rounds: the pool can carry them.
    load=st.sampled_from([0.6, 0.75, 0.85]),
)
@settings(quick, max_examples=4, phases=[Phase.generate])
def test_no_task_starves_under_fairness(gang_s: float, short_s: float, load: float) -> None:
    """However long the stream of others lasts, the gang is not much later than its fair share."""
    for count in (80, 160):
        ratio, _ = _gang_in_a_stream(gang_s, short_s, short_s / 4 / load, count, 0.3)
        assert ratio < 3


def test_without_fairness_a_gang_waits_for_the_end_of_the_stream() -> None:
    """What the guard is for."""
    for count in (60, 120):
        _, finish_s = _gang_in_a_stream(4000.0, 700.0, 240.0, count, 0.0)
        assert finish_s > count * 240.0
