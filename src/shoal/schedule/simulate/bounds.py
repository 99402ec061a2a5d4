"""Lower bounds that no schedule of the trace can beat, with any policy.

Both are linear programs over device time z[G, g] (seconds that group G of table rows runs on
devices of kind g), for all groups up to `together_max` that gain over taking turns; a group that
does not is no better than its members in turn, so leaving it out loses nothing. A schedule may
know the future, interrupt for free and split time as finely as it likes; a task is never faster
than its row allows, and never runs on more than its gang.

Makespan: all work is done by T, no task runs longer than from its arrival to T.

Average completion time: `patterns` has the tight program. Where that would be too large: time is
cut into intervals. Let q[j, g, t] be the part of task j that is
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

from shoal.schedule.allocator.solver import INFINITY, Ints, Program, sums
from shoal.schedule.model.entities import Pool, Task
from shoal.schedule.model.throughputs import Floats, Throughputs
from shoal.schedule.simulate.patterns import (
    INTERVALS_MIN,
    find_modes,
    interval_count,
    pattern_bound,
)
from shoal.schedule.simulate.workload import Workload

#: Intervals of the completion-time bound: more are tighter and slower.
INTERVALS = 64
#: The open last interval of the pattern bound starts at this part of the least makespan.
OPEN_FROM = 1.2
#: Beyond these sizes the completion time has only its trivial bound: all tasks alone at full speed.
TASKS_MAX = 1500
GROUPS_MAX = 6000


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds. No schedule has a lower average completion time, or a lower makespan."""

    average_completion_s: float
    makespan_s: float


def makespan_bound(
    pool: Pool, table: Throughputs, tasks: Sequence[Task], together_max: int = 2
) -> float:
    """Seconds from the first arrival to the last finish, at least."""
    return _makespan(Workload(pool, table, tasks, together_max))


def _makespan(work: Workload) -> float:
    """Work per (row, kind) comes from groups and goes to tasks; the program minimizes the horizon T."""
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
    pool: Pool,
    table: Throughputs,
    tasks: Sequence[Task],
    together_max: int = 2,
    latest_s: float | None = None,
    round_s: float | None = None,
    intervals: int | None = None,
) -> float | None:
    """Seconds of average completion time, at least. None: no schedule can be that early.

    Args:
        latest_s: Only schedules that end by then, in seconds from the first arrival.
        round_s: Only schedules that start tasks at multiples of this, as a pool with rounds does.
        intervals: Cuts of the time; as many as a program of moderate size allows.
    """
    work = Workload(pool, table, tasks, together_max)
    waits_s = 0.0
    if round_s is not None:
        starts = np.ceil(work.arrivals / round_s - 1e-9) * round_s
        waits_s = float((starts - work.arrivals).mean())
        work.arrivals = starts
    if intervals is None:
        intervals = max(INTERVALS_MIN, interval_count(work, find_modes(work)))
    horizon_s = OPEN_FROM * _makespan(work)
    bound_s = pattern_bound(work, horizon_s, intervals, latest_s)
    return None if bound_s is None else bound_s + waits_s


def _completion(work: Workload, makespan_s: float) -> float:
    trivial = float(work.least_s.mean())
    if len(work.tasks) > TASKS_MAX or len(work.groups) > GROUPS_MAX:
        return trivial
    intervals = interval_count(work, find_modes(work))
    if intervals:
        bound_s = pattern_bound(work, OPEN_FROM * makespan_s, intervals)
        return trivial if bound_s is None else max(trivial, bound_s)
    return max(trivial, _mean_progress(work, makespan_s))


def _mean_progress(work: Workload, makespan_s: float) -> float:
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
    return bound - float(work.arrivals.mean())


def _parts(work: Workload, ends: Floats) -> tuple[Ints, Ints, Ints]:
    """(task, kind, interval) of all parts that may be non-zero."""
    task, kind = np.nonzero(work.speeds > 0)
    usable = ends[None, :] > work.arrivals[task, None]
    choice, when = np.nonzero(usable)
    return task[choice], kind[choice], when


def _add_supply(
    program: Program,
    work: Workload,
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
    """Return both bounds of a trace on a pool."""
    work = Workload(pool, table, tasks, together_max)
    makespan_s = _makespan(work)
    return Bounds(_completion(work, makespan_s), makespan_s)
