"""The solver's wrapper, and the round's integer program when the search finds nothing."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.schedule.allocator import round_program
from shoal.schedule.allocator.policy import TaskState, View
from shoal.schedule.allocator.solver import INFINITY, Program
from shoal.schedule.model.entities import Pool, Task
from shoal.schedule.model.throughputs import Throughputs
from shoal.schedule.policies.shoal import Shoal
from shoal.schedule.simulate.simulator import check


def test_prices_are_the_worth_of_one_more() -> None:
    program = Program()
    x = program.columns(np.array([-3.0, -2.0]))
    rows = program.at_most(np.array([4.0, 6.0]))
    program.add(rows[[0, 0, 1]], x[[0, 1, 0]], np.array([1.0, 1.0, 3.0]))
    solution = program.solve()
    assert solution is not None
    assert solution.values.tolist() == [2.0, 2.0]
    assert solution.prices.tolist() == pytest.approx([-2.0, -1 / 3])


def test_entries_added_twice_count_twice() -> None:
    program = Program()
    x = program.columns(np.array([-1.0]))
    row = program.at_most(np.array([4.0]))
    program.add(row, x, np.ones(1))
    program.add(row, x, np.ones(1))
    solution = program.solve()
    assert solution is not None
    assert solution.values.tolist() == [2.0]


def test_no_feasible_point_is_none() -> None:
    program = Program()
    x = program.columns(np.ones(1), upper=1.0)
    row = program.rows(np.array([2.0]), np.array([INFINITY]))
    program.add(row, x, np.ones(1))
    assert program.solve() is None


def _view(tasks: int, devices: str = "a:5,b:4") -> View:
    table = Throughputs(
        ("a", "b"),
        [("x", 1), ("y", 2)],
        np.array([[2.0, 1.0], [3.0, 1.0]]),
        busy=np.full((2, 2, 2), 0.4),
    )
    made = [Task(f"t{n}", "xy"[n % 2], 1000.0 + 37 * n, devices=n % 2 + 1) for n in range(tasks)]
    states = [TaskState(n, t, table.row_of[t.type, t.devices], t.steps) for n, t in enumerate(made)]
    return View(0.0, 360.0, 0.0, Pool.parse(devices), table, states, together_max=3)


def test_without_a_search_the_plan_is_greedy_not_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    view = _view(12)
    best = Shoal().decide(view)
    monkeypatch.setattr(round_program.RoundProgram, "_search", lambda self, relaxed: None)
    greedy = Shoal().decide(view)
    check(view, greedy)
    assert best.value is not None
    assert greedy.value is not None
    assert 0.5 * best.value < greedy.value <= best.value * (1 + 1e-9)


def test_many_tasks_are_searched_in_part_and_stay_near_the_bound() -> None:
    view = _view(600, "a:50,b:40")
    plan = Shoal().decide(view)
    check(view, plan)
    assert plan.gap is not None
    assert plan.gap < 0.02
