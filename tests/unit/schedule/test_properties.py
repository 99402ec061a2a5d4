"""What must hold for every policy, pool and trace."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedule_worlds import views, worlds

from shoal.schedule.bounds import bounds, makespan_bound
from shoal.schedule.model import Kind, Pool, Task
from shoal.schedule.policies.shoal import Shoal
from shoal.schedule.policy import View, policies
from shoal.schedule.simulator import Result, Simulation, check
from shoal.schedule.throughputs import Throughputs

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


def test_no_task_starves_under_fairness() -> None:
    """A long gang among a stream of short tasks that would fill the pool for ever."""
    table = Throughputs(
        ("gpu",), [("long", 4), ("short", 1)], np.array([[1.0], [1.0]]), busy=np.ones((2, 1, 2))
    )
    stream = [Task(f"s{n}", "short", 700.0, 240.0 * n) for n in range(250)]
    gang = Task("gang", "long", 4000.0, 0.0, devices=4)
    pool = Pool.parse("gpu:4")
    ratios = []
    for balance in (0.0, 0.3):
        run = Simulation(pool, table, [gang, *stream], Shoal(balance), 360.0, together_max=1).run()
        ratios.append(run.finish_ratios[run.tasks.index(gang)])
    assert ratios[0] > 4  # Completion time alone lets it wait until the stream is over.
    assert ratios[1] < 2.5
