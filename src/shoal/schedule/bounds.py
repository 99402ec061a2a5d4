"""Lower bounds: no schedule of the trace, by whatever policy, is better than these.

Both are linear programs over device time z[G, g] (seconds that group G of table rows runs on
devices of kind g), for all groups up to `together_max` that gain over taking turns; a group that
does not is no better than its members in turn, so leaving it out loses nothing. A schedule may
know the future, interrupt for free and split time as finely as it likes; a task is never faster
than its row allows, and never runs on more than its gang.

Makespan: all work is done by T, no task runs longer than from its arrival to T.

Average completion time: time is cut into intervals. Let q[j, g, t] be the part of task j that is
done on kind g in interval t. Its completion C satisfies all of
    C >= sum q · max(start of t, arrival) + p/2   (its progress is never faster than 1/p, with p
                                                  its least duration, so it ends at least p/2
                                                  after the mean of its progress),
    C >= arrival + p,
    C >= arrival + sum q · (least time for it on kind g).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.schedule.model import Pool, Task
from shoal.schedule.solver import INFINITY, Ints, Program, sums
from shoal.schedule.throughputs import Floats, Group, Throughputs

#: Intervals of the completion-time bound: more are tighter and slower.
INTERVALS = 64
#: Beyond these sizes the completion time has only its trivial bound: all tasks alone at full speed.
TASKS_MAX = 1500
GROUPS_MAX = 6000


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds. No schedule has a lower average completion time, or a lower makespan."""

    average_completion_s: float
    makespan_s: float


class _Work:
    """What both programs share: tasks, their rows, and the groups of rows on each kind."""

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


def makespan_bound(
    pool: Pool, table: Throughputs, tasks: Sequence[Task], together_max: int = 2
) -> float:
    """Seconds from the first arrival to the last finish, at least."""
    return _makespan(_Work(pool, table, tasks, together_max))


def _makespan(work: _Work) -> float:
    """Work per (row, kind) comes from groups and goes to tasks; the horizon T is minimised."""
    program = Program()
    number, kind, row, rate = work.members()
    kinds_count = len(work.counts)
    horizon = program.columns(np.ones(1))
    device_time = program.columns(np.zeros(len(work.groups)))
    task, place = np.nonzero(work.speeds > 0)
    done = program.columns(np.zeros(len(task)))  # Part of the task that is done on the kind.
    finished = program.equal(np.ones(len(work.tasks)))
    program.add(finished[task], done, np.ones(len(task)))
    # Least time the task is busy, against the time it has.
    busy = program.at_most(-work.arrivals)
    program.add(busy[task], done, work.steps[task] / work.speeds[task, place])
    program.add(busy, np.repeat(horizon, len(busy)), -np.ones(len(busy)))
    capacity = program.at_most(np.zeros(kinds_count))
    group_kind = np.array([k for k, _, _ in work.groups])
    program.add(capacity[group_kind], device_time, work.gangs())
    program.add(capacity, np.repeat(horizon, kinds_count), -work.counts)
    supply = program.equal(np.zeros(len(work.table.rows) * kinds_count))
    program.add(supply[row * kinds_count + kind], device_time[number], rate)
    program.add(supply[work.rows[task] * kinds_count + place], done, -work.steps[task])
    # Groups only serve a row as long as it has tasks to fill them.
    rows_count = len(work.table.rows)
    present = sums(work.rows, np.ones(len(work.tasks)), rows_count)
    slots = program.at_most(-sums(work.rows, work.arrivals, rows_count))
    program.add(slots[row], device_time[number], np.ones(len(number)))
    program.add(slots, np.repeat(horizon, len(slots)), -present)
    solution = program.solve()
    assert solution is not None, "with time enough, all work is feasible"
    return solution.bound


def _interval_edges(horizon_s: float, least_s: float) -> Floats:
    """Even up to the horizon, finer near 0 where short tasks finish, coarse after it."""
    even = np.linspace(0.0, horizon_s, INTERVALS + 1)
    early = np.geomspace(least_s, horizon_s / INTERVALS, INTERVALS // 8)
    late = horizon_s * np.array([1.1, 1.25, 1.5, 2.0])
    return np.unique(np.concatenate([even, early, late]))


def completion_bound(
    pool: Pool, table: Throughputs, tasks: Sequence[Task], together_max: int = 2
) -> float:
    """Seconds of average completion time, at least."""
    work = _Work(pool, table, tasks, together_max)
    return _completion(work, _makespan(work))


def _completion(work: _Work, makespan_s: float) -> float:
    trivial = float(work.least_s.mean())
    if len(work.tasks) > TASKS_MAX or len(work.groups) > GROUPS_MAX:
        return trivial
    # A schedule may well end after the least makespan: the last interval is open.
    edges = _interval_edges(makespan_s, min(float(work.least_s.min()), makespan_s / 1000))
    starts, ends = edges, np.append(edges[1:], INFINITY)
    lengths = np.where(np.isfinite(ends), ends - starts, 1e3 * makespan_s)
    program = Program()
    task, kind, when = _parts(work, ends)
    done = program.columns(np.zeros(len(task)))
    finished = program.equal(np.ones(len(work.tasks)))
    program.add(finished[task], done, np.ones(len(task)))
    _add_supply(program, work, lengths, ends, (task, kind, when), done)
    completion = program.columns(np.full(len(work.tasks), 1.0 / len(work.tasks)))
    one = np.ones(len(work.tasks))
    after = program.rows(work.least_s / 2, one * INFINITY)  # C - sum q·start >= p/2
    program.add(after, completion, one)
    program.add(after[task], done, -np.maximum(starts[when], work.arrivals[task]))
    least = program.rows(work.arrivals + work.least_s, one * INFINITY)
    program.add(least, completion, one)
    running = program.rows(work.arrivals, one * INFINITY)
    program.add(running, completion, one)
    program.add(running[task], done, -work.steps[task] / work.speeds[task, kind])
    solution = program.solve(method="ipm")
    bound = -INFINITY if solution is None else solution.bound
    return max(trivial, bound - float(work.arrivals.mean()))


def _parts(work: _Work, ends: Floats) -> tuple[Ints, Ints, Ints]:
    """(task, kind, interval) of all parts that may be non-zero."""
    task, kind = np.nonzero(work.speeds > 0)
    usable = ends[None, :] > work.arrivals[task, None]
    choice, when = np.nonzero(usable)
    return task[choice], kind[choice], when


def _add_supply(
    program: Program,
    work: _Work,
    lengths: Floats,
    ends: Floats,
    parts: tuple[Ints, Ints, Ints],
    done: Ints,
) -> None:
    """Per interval: devices give time to groups, groups give steps to rows, rows to tasks."""
    task, kind, when = parts
    number, group_kind, row, rate = work.members()
    kinds_count, rows_count, times = len(work.counts), len(work.table.rows), len(lengths)
    all_kinds = np.array([k for k, _, _ in work.groups])
    gangs = work.gangs()
    device_time = program.columns(np.zeros(len(work.groups) * times)).reshape(-1, times)
    capacity = program.at_most(np.outer(work.counts, lengths).ravel()).reshape(-1, times)
    supply = program.equal(np.zeros(rows_count * kinds_count * times)).reshape(-1, times)
    # Task seconds that a row can use: each present task, from its arrival on.
    open_s = np.clip(ends[None, :] - work.arrivals[:, None], 0.0, lengths[None, :])
    row_time = np.zeros((rows_count, times))
    np.add.at(row_time, work.rows, open_s)
    slots = program.at_most(row_time.ravel()).reshape(-1, times)
    for t in range(times):
        program.add(capacity[all_kinds, t], device_time[:, t], gangs)
        program.add(supply[row * kinds_count + group_kind, t], device_time[number, t], rate)
        program.add(slots[row, t], device_time[number, t], np.ones(len(number)))
    program.add(supply[work.rows[task] * kinds_count + kind, when], done, -work.steps[task])
    # A task is busy at most all of an interval.
    busy = program.at_most(open_s.ravel()).reshape(-1, times)
    program.add(busy[task, when], done, work.steps[task] / work.speeds[task, kind])


def bounds(pool: Pool, table: Throughputs, tasks: Sequence[Task], together_max: int = 2) -> Bounds:
    """Both bounds of a trace on a pool."""
    work = _Work(pool, table, tasks, together_max)
    makespan_s = _makespan(work)
    return Bounds(_completion(work, makespan_s), makespan_s)
