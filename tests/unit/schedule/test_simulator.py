"""The simulator's own arithmetic, on cases small enough to do by hand."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.schedule.allocator.fairshare import fair_finishes
from shoal.schedule.allocator.placement import place
from shoal.schedule.allocator.policy import Assignment, Plan, Policy, View
from shoal.schedule.model.entities import Pool, Task
from shoal.schedule.model.throughputs import Throughputs
from shoal.schedule.policies.fifo import Fifo
from shoal.schedule.policies.shoal import Shoal
from shoal.schedule.simulate.simulator import Simulation, StuckError, check

ONE = Throughputs(("gpu",), [("a", 1)], np.array([[1.0]]), busy=np.full((1, 1, 2), 0.4))


class Scripted(Policy):
    """Plays given plans: per round a list of (kind, ids)."""

    name = ""

    def __init__(self, *rounds: list[tuple[int, tuple[int, ...]]]) -> None:
        self.rounds = list(rounds)

    def decide(self, view: View) -> Plan:
        script = self.rounds.pop(0) if len(self.rounds) > 1 else self.rounds[0]
        present = {state.id for state in view.tasks}
        chosen = [Assignment(k, ids) for k, ids in script if present.issuperset(ids)]
        return Plan(tuple(chosen))


def test_a_task_is_done_when_its_steps_are_done_not_when_the_round_is() -> None:
    run = Simulation(Pool.parse("gpu:1"), ONE, [Task("t", "a", 500.0)], Fifo(), 360.0).run()
    assert run.finishes_s.tolist() == [500.0]
    assert run.busy_s == 500.0


def test_a_device_idles_until_the_round_ends_unless_all_are_done() -> None:
    tasks = [Task("short", "a", 100.0), Task("next", "a", 100.0), Task("long", "a", 360.0)]
    script = Scripted([(0, (0,)), (0, (2,))], [(0, (1,))])
    run = Simulation(Pool.parse("gpu:2"), ONE, tasks, script, 360.0).run()
    assert run.finishes_s.tolist() == [100.0, 460.0, 360.0]
    run = Simulation(Pool.parse("gpu:1"), ONE, tasks[:2], Fifo(), 360.0).run()
    assert run.finishes_s.tolist() == [100.0, 200.0]


def test_sharing_slows_down_and_ends_when_one_is_done() -> None:
    half = Throughputs(("gpu",), [("a", 1)], np.array([[1.0]]), busy=np.ones((1, 1, 2)))
    tasks = [Task("x", "a", 100.0), Task("y", "a", 150.0)]
    run = Simulation(Pool.parse("gpu:1"), half, tasks, Scripted([(0, (0, 1))]), 360.0)
    # Both at half speed until 200, then 50 steps alone.
    assert run.run().finishes_s.tolist() == [200.0, 250.0]


def test_a_restart_costs_once_per_move_and_nothing_at_the_first_start() -> None:
    tasks = [Task("t", "a", 720.0), Task("u", "a", 5000.0)]
    stay = Scripted([(0, (0,)), (0, (1,))])
    run = Simulation(Pool.parse("gpu:2"), ONE, tasks, stay, 360.0, 60.0).run()
    assert run.restarts == 0
    assert run.finishes_s[0] == 720.0
    pause = Scripted([(0, (0,)), (0, (1,))], [(0, (1,))], [(0, (0,)), (0, (1,))])
    run = Simulation(Pool.parse("gpu:2"), ONE, tasks, pause, 360.0, 60.0).run()
    assert run.restarts == 1
    assert run.finishes_s[0] == 360.0 + 360.0 + 60.0 + 360.0


def test_tasks_keep_their_devices_and_gangs_get_one_node() -> None:
    pool = Pool.parse("gpu:8")
    nodes = Pool(tuple(type(k)(k.name, k.count, 0, 4) for k in pool.kinds))
    before = place(nodes, (Assignment(0, (1,)), Assignment(0, (2,))), {1: 1, 2: 2}, {})
    after = place(
        nodes,
        (Assignment(0, (2,)), Assignment(0, (3,)), Assignment(0, (1,))),
        {1: 1, 2: 2, 3: 4},
        before,
    )
    assert after[1] == before[1]
    assert after[2] == before[2]
    assert len({device // 4 for device in after[3]}) == 1


def test_check_refuses_impossible_plans() -> None:
    tasks = [Task("x", "a", 100.0), Task("y", "a", 150.0)]
    seen: list[View] = []

    class Spy(Fifo):
        def decide(self, view: View) -> Plan:
            seen.append(view)
            return super().decide(view)

    Simulation(Pool.parse("gpu:1"), ONE, tasks, Spy(), 360.0).step()
    with pytest.raises(AssertionError, match="of 1 gpu"):
        check(seen[0], Plan((Assignment(0, (0,)), Assignment(0, (1,)))))
    with pytest.raises(AssertionError, match="runs twice"):
        check(seen[0], Plan((Assignment(0, (0,)), Assignment(0, (0,)))))


def test_a_policy_that_runs_nothing_is_found_out() -> None:
    class Lazy(Policy):
        name = ""

        def decide(self, view: View) -> Plan:
            return Plan(())

    with pytest.raises(StuckError, match="1 wait: t"):
        Simulation(Pool.parse("gpu:1"), ONE, [Task("t", "a", 1.0)], Lazy()).run()


def test_fair_finishes_share_equally() -> None:
    pool = Pool.parse("gpu:1")
    tasks = [Task("x", "a", 100.0), Task("y", "a", 200.0), Task("z", "a", 10.0, 1000.0)]
    # Half speed until 200, then y alone for its last 100 steps.
    assert fair_finishes(pool, ONE, [0, 0, 0], tasks).tolist() == [200.0, 300.0, 1010.0]


def test_three_light_tasks_share_one_device_when_that_is_best() -> None:
    light = Throughputs(("gpu",), [("a", 1)], np.array([[1.0]]), busy=np.full((1, 1, 2), 0.3))
    tasks = [Task(f"t{n}", "a", 3600.0) for n in range(3)]
    pool = Pool.parse("gpu:1")
    alone = Simulation(pool, light, tasks, Shoal(), 360.0, together_max=1).run()
    three = Simulation(pool, light, tasks, Shoal(), 360.0, together_max=3).run()
    assert alone.makespan_s == 3 * 3600
    assert three.finishes_s.tolist() == [3600.0] * 3


def test_memory_stops_sharing() -> None:
    big = Throughputs(
        ("gpu",), [("a", 1)], np.array([[1.0]]), np.array([[9.0 * 2**30]]), np.full((1, 1, 2), 0.3)
    )
    tasks = [Task(f"t{n}", "a", 720.0) for n in range(2)]
    for memory, expected_s in (("16GiB", 1440.0), ("20GiB", 720.0)):
        run = Simulation(Pool.parse(f"gpu:1:{memory}"), big, tasks, Shoal(), 360.0).run()
        assert run.makespan_s == expected_s


def test_a_deadline_pulls_a_task_forward() -> None:
    tasks = [Task(f"t{n}", "a", 1000.0) for n in range(8)]
    urgent = Task("urgent", "a", 3000.0, deadline_s=3400.0)
    pool = Pool.parse("gpu:1")
    late = Simulation(pool, ONE, [*tasks, urgent], Shoal(0.0), 360.0, together_max=1).run()
    due = Simulation(pool, ONE, [*tasks, urgent], Shoal(1.0), 360.0, together_max=1).run()
    assert late.completions_s[-1] > 3400.0
    assert due.completions_s[-1] <= 3400.0
