"""A trace's work, and all ways in which a pool can do it: shared by the bounds' programs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.schedule.allocator.solver import Ints
from shoal.schedule.model.entities import Pool, Task
from shoal.schedule.model.throughputs import Floats, Group, Throughputs


class Workload:
    """Tasks, their rows, and every group of rows that could be of use, on each kind."""

    def __init__(
        self, pool: Pool, table: Throughputs, tasks: Sequence[Task], together_max: int
    ) -> None:
        self.pool = pool
        self.table = table.select(pool.names)
        self.tasks = list(tasks)
        self.rows = np.array([self.table.row_of[t.type, t.devices] for t in self.tasks])
        self.steps = np.array([t.steps for t in self.tasks])
        self.arrivals = np.array([t.arrival_s for t in self.tasks])
        self.arrivals -= self.arrivals.min()
        self.counts = np.array([k.count for k in pool.kinds], dtype=np.float64)
        allowed = np.array(
            [
                [
                    (t.kinds is None or k.name in t.kinds)
                    and t.devices <= k.count
                    and self.table.fits(number, (row,), k.memory_bytes)
                    for number, k in enumerate(pool.kinds)
                ]
                for t, row in zip(self.tasks, self.rows.tolist(), strict=True)
            ]
        )
        #: Fastest speed of task j on kind g, beside whomever; 0: it may not run there.
        self.speeds: Floats = np.where(allowed, self.table.alone[self.rows], 0.0)
        self.groups: list[tuple[int, Group, tuple[float, ...]]] = []
        present = sorted(set(self.rows.tolist()))
        for kind, place in enumerate(pool.kinds):
            for row in present:
                self._add_group(kind, (row,))
            shared = self.table.useful_groups(kind, present, place.memory_bytes, together_max)
            for group in shared:
                self._add_group(kind, group)
        self.least_s: Floats = self.steps / self.speeds.max(axis=1)

    def _add_group(self, kind: int, group: Group) -> None:
        rates = self.table.rates(kind, group)
        if rates is None or self.table.rows[group[0]][1] > self.pool.kinds[kind].count:
            return
        self.groups.append((kind, group, rates))
        # Some measured pairs run faster than alone; a bound has to allow it.
        for row, rate in zip(group, rates, strict=True):
            mine = (self.rows == row) & (self.speeds[:, kind] > 0)
            self.speeds[mine, kind] = np.maximum(self.speeds[mine, kind], rate)

    def members(self) -> tuple[Ints, Ints, Ints, Floats]:
        """For each (group, member): the group's number, its kind, the row, steps/s."""
        flat = [
            (number, kind, row, rate)
            for number, (kind, group, rates) in enumerate(self.groups)
            for row, rate in zip(group, rates, strict=True)
        ]
        number, kind, row = (np.array([m[i] for m in flat], dtype=np.int64) for i in range(3))
        return number, kind, row, np.array([m[3] for m in flat])

    def gangs(self) -> Floats:
        return np.array([self.table.rows[g[0]][1] for _, g, _ in self.groups], dtype=np.float64)
