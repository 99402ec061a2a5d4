"""The linear program that all share policies have in common.

Columns are fractions of time x[group, kind]. A kind's devices are not given twice, and a task
spends at most all of its time. What is maximised differs from policy to policy.
"""

from __future__ import annotations

import numpy as np

from shoal.schedule.allocator.fairshare import EqualShares
from shoal.schedule.allocator.policy import View
from shoal.schedule.allocator.solver import INFINITY, Ints, Program, Solution
from shoal.schedule.allocator.time_shares import Ids, Shares
from shoal.schedule.model.throughputs import Floats


class ShareProgram:
    """Shares of single tasks, and of pairs where `packed`.

    Args:
        speeds: steps/s alone, shape (tasks, kinds). Policies that are blind to speed pass ones.
    """

    def __init__(self, view: View, speeds: Floats, packed: bool = False) -> None:
        self.view = view
        self.states = list(view.tasks)
        self.index = {state.id: number for number, state in enumerate(self.states)}
        self.groups: list[Ids] = []
        # Per column: its kind, its group, its members' speeds.
        kinds: list[int] = []
        columns_of: list[int] = []
        rates: list[tuple[float, ...]] = []
        for number, state in enumerate(self.states):
            self.groups.append((state.id,))
            for kind in range(len(view.pool.kinds)):
                if view.may_run(state, kind):
                    kinds.append(kind)
                    columns_of.append(len(self.groups) - 1)
                    rates.append((float(speeds[number, kind]),))
        if packed:
            self._add_pairs(kinds, columns_of, rates)
        self.kinds, self.columns_of, self.rates = kinds, columns_of, rates
        self._find_members()

    def _add_pairs(
        self, kinds: list[int], columns_of: list[int], rates: list[tuple[float, ...]]
    ) -> None:
        """Return the pairs that gain over taking turns on at least one kind."""
        view, table = self.view, self.view.table
        present = {state.row for state in self.states}
        worth: dict[tuple[int, int], list[int]] = {}
        for kind, place in enumerate(view.pool.kinds):
            for pair in table.groups(kind, present, place.memory_bytes, 2):
                worth.setdefault((pair[0], pair[1]), []).append(kind)
        for i, first in enumerate(self.states):
            for second in self.states[i + 1 :]:
                swap = first.row > second.row
                pair = (second.row, first.row) if swap else (first.row, second.row)
                usable = [
                    kind
                    for kind in worth.get(pair, ())
                    if view.may_run(first, kind) and view.may_run(second, kind)
                ]
                if not usable:
                    continue
                self.groups.append((first.id, second.id))
                for kind in usable:
                    both = table.rates(kind, pair)
                    assert both is not None
                    kinds.append(kind)
                    columns_of.append(len(self.groups) - 1)
                    rates.append((both[1], both[0]) if swap else both)

    def _find_members(self) -> None:
        """Flat arrays: for each (column, member) its column, its task and its speed."""
        members = [
            (column, self.index[task], rate)
            for column, (group, rates) in enumerate(zip(self.columns_of, self.rates, strict=True))
            for task, rate in zip(self.groups[group], rates, strict=True)
        ]
        self.member_column: Ints = np.array([m[0] for m in members], dtype=np.int64)
        self.member_task: Ints = np.array([m[1] for m in members], dtype=np.int64)
        self.member_rate: Floats = np.array([m[2] for m in members])
        self.gangs = np.array([state.task.devices for state in self.states], dtype=np.float64)

    def program(self, times: bool = False) -> Program:
        """The rows that all share policies have: capacity of kinds, and time of tasks.

        With `times`, columns are seconds instead of shares and one more column is the horizon that
        they have to fit; it costs 1 per second.
        """
        program = Program()
        columns = program.columns(np.zeros(len(self.kinds)))
        counts = np.array([float(kind.count) for kind in self.view.pool.kinds])
        ones = np.ones(len(self.states))
        limit = 0.0 if times else 1.0
        capacity, whole = program.at_most(counts * limit), program.at_most(ones * limit)
        gang_of = np.array([self.gangs[self.index[self.groups[g][0]]] for g in self.columns_of])
        program.add(capacity[np.array(self.kinds)], columns, gang_of)
        program.add(whole[self.member_task], self.member_column, np.ones(len(self.member_column)))
        if times:
            horizon = program.columns(np.ones(1))
            program.add(capacity, np.repeat(horizon, len(capacity)), -counts)
            program.add(whole, np.repeat(horizon, len(whole)), -ones)
        return program

    def max_min(self, needs: Floats) -> tuple[Solution, float]:
        """Maximize the least speed / need over the tasks. Return the shares and that value."""
        program = self.program()
        least = program.columns(np.array([-1.0]))
        rows = program.rows(np.zeros(len(needs)), np.full(len(needs), INFINITY))
        program.add(rows[self.member_task], self.member_column, self.member_rate)
        program.add(rows, np.repeat(least, len(needs)), -needs)
        # The interior point, not a corner: it spreads what is left over instead of giving it all
        # to a few.
        solution = program.solve(method="interior")
        assert solution is not None, "zero shares are always feasible"
        return solution, -solution.objective

    def shares(self, values: Floats) -> Shares:
        """Return the solution's columns as shares."""
        found: Shares = {}
        for value, group, kind in zip(values, self.columns_of, self.kinds, strict=False):
            ids = self.groups[group]
            if len(ids) > 1 and value <= 1e-9:
                continue
            share = found.setdefault(ids, np.zeros(len(self.view.pool.kinds)))
            share[kind] = min(1.0, max(0.0, float(value)))
        return found


def alone_speeds(view: View) -> Floats:
    """Return steps/s of each task alone on each kind, shape (tasks, kinds)."""
    speeds: Floats = view.table.alone[[state.row for state in view.tasks]]
    return speeds


def average_speeds(view: View) -> Floats:
    """Return steps/s of each task averaged over the pool's devices, for any size of gang."""
    counts = np.array([kind.count for kind in view.pool.kinds], dtype=np.float64)
    speeds: Floats = alone_speeds(view) @ (counts / counts.sum())
    return speeds


def equal_share_speeds(view: View) -> Floats:
    """Return steps/s of each task with 1/n of the pool, for n present tasks."""
    rows = [state.row for state in view.tasks]
    tasks = [state.task for state in view.tasks]
    shares = EqualShares(view.pool, view.table, rows, tasks)
    return shares.rates(np.arange(len(tasks)), len(tasks))
