"""A tight lower bound of the average completion time: whole ways to run a task compete.

Time is cut into intervals. z[j, T] is the part of task j whose last bit of work falls into
interval T, and h[j, T, m, t] the time it is busy in mode m in interval t <= T on that way. A mode
is a kind of device and a level of speed: beside a hungry neighbour a task is slower than alone, so
it takes longer, whatever the device gains. Any schedule, interrupted as often as it likes, gives
whole z and h with

    for each task and T    its work is done:  sum of h · (mode's speed) = z · steps
    for each t as well     it runs in one place at a time:  sum of h <= z · length of t
    for each mode and t    groups that run on devices give it this much time
    for each kind and t    the groups' devices are no more than there are

and the task ends at start of T + (time it is busy in T), or later. The linear program drops only
the wholeness of z, the order of tasks inside an interval, and the differences of speed inside a
level, always in the schedule's favour. The simpler bound by the mean of a task's progress
(`bounds`) credits half the time of the *fastest* way to run it; here a task that is to end early
has to pay for the devices on which it can.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.schedule.allocator.solver import Ints, Program
from shoal.schedule.model.throughputs import Floats
from shoal.schedule.simulate.workload import Workload

#: Speeds within these parts of a row's fastest on a kind are one level: more are tighter.
LEVELS = (0.97, 0.8, 0.65, 0.5, 0.0)
#: Columns of the program, and the intervals that keep it below; with fewer it says too little.
COLUMNS_MAX = 110_000
INTERVALS_MIN, INTERVALS_MAX = 6, 24
#: Slack for the solver's own tolerance, as a part of the bound.
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Modes:
    """Ways in which a row can progress: on a kind, at up to a speed."""

    rows: Ints
    kinds: Ints
    speeds: Floats  # steps/s, the fastest of the level.
    of_member: Ints  # Mode of each (group, member).


def find_modes(work: Workload) -> Modes:
    """Sort every member of every group into a level of speed of its row on that kind."""
    _, kind, row, rate = work.members()
    kinds_count, levels = len(work.counts), len(LEVELS)
    fastest = np.zeros((len(work.table.rows), kinds_count))
    np.maximum.at(fastest, (row, kind), rate)
    level = np.searchsorted(-np.array(LEVELS), -rate / fastest[row, kind], side="left")
    found, of_member = np.unique((row * kinds_count + kind) * levels + level, return_inverse=True)
    speeds = np.zeros(len(found))
    np.maximum.at(speeds, of_member, rate)
    place = found // levels
    return Modes(place // kinds_count, place % kinds_count, speeds, of_member)


@dataclass(frozen=True, slots=True)
class Parts:
    """One entry for each h: task, mode, the interval T of the way, and the interval t <= T."""

    task: Ints
    mode: Ints
    last: Ints
    when: Ints

    def __len__(self) -> int:
        return len(self.task)


def interval_count(work: Workload, modes: Modes) -> int:
    """As many intervals as the program's size allows; 0: too few to be of use."""
    per_task = (work.rows[:, None] == modes.rows[None, :]) & (work.speeds[:, modes.kinds] > 0)
    # Devices' time is a column for each group and interval, h for each pair of intervals.
    pairs, groups = float(per_task.sum()), float(len(work.groups))
    for count in range(INTERVALS_MAX, INTERVALS_MIN - 1, -1):
        if pairs * count * (count + 1) / 2 + groups * count <= COLUMNS_MAX:
            return count
    return 0


def pattern_bound(
    work: Workload, horizon_s: float, intervals: int, latest_s: float | None = None
) -> float | None:
    """Seconds of average completion time, at least. None: no schedule can be that early.

    Args:
        horizon_s: Time until which intervals are short; the last one is open.
        latest_s: Schedules whose last finish is later than this do not count.
    """
    modes = find_modes(work)
    # The solver's tolerance is absolute: in units of the tasks' own length, numbers stay near 1.
    unit_s = float(work.least_s.mean())
    end_s = horizon_s if latest_s is None else latest_s
    edges = np.linspace(0.0, end_s, intervals + 1) / unit_s
    if latest_s is None:  # So much time that its length is no limit.
        edges = np.append(edges, edges[-1] + 1e3 * horizon_s / unit_s)
    starts, ends = edges[:-1], edges[1:]
    arrivals = work.arrivals / unit_s
    parts, way = _parts(work, modes, ends * unit_s)
    task, last = way
    count = len(work.tasks)
    program = Program()
    begun = np.maximum(starts[last], arrivals[task])
    z = program.columns(begun / count)
    h = program.columns(np.where(parts.when == parts.last, 1.0, 0.0) / count)
    once = program.equal(np.ones(count))
    program.add(once[task], z, np.ones(len(z)))
    number = np.full((count, len(starts)), -1)
    number[task, last] = np.arange(len(z))
    mine = number[parts.task, parts.last]
    worked = program.equal(np.zeros(len(z)))
    length = work.steps[parts.task] / modes.speeds[parts.mode] / unit_s
    program.add(worked, z, -np.ones(len(z)))
    program.add(worked[mine], h, 1.0 / length)
    busy, place = np.unique(mine * len(starts) + parts.when, return_inverse=True)
    on_way, when = np.divmod(busy, len(starts))
    one_place = program.at_most(np.zeros(len(busy)))
    open_time = ends[when] - np.maximum(starts[when], arrivals[task[on_way]])
    program.add(one_place[place], h, np.ones(len(h)))
    program.add(one_place, z[on_way], -open_time)
    _add_devices(program, work, modes, ends - starts, parts, h)
    solution = program.solve(method="interior")
    if solution is None:
        return None
    average = solution.bound * (1 - TOLERANCE) - float(arrivals.mean())
    return average * unit_s


def _parts(work: Workload, modes: Modes, ends_s: Floats) -> tuple[Parts, tuple[Ints, Ints]]:
    """All h that may be non-zero, and the (task, T) of all z: T not before the task can be done."""
    intervals = len(ends_s)
    able = (work.rows[:, None] == modes.rows[None, :]) & (work.speeds[:, modes.kinds] > 0)
    task, mode = np.nonzero(able)
    last, when = np.nonzero(np.tri(intervals, dtype=np.bool_))
    many = len(last)
    parts = [np.repeat(task, many), np.repeat(mode, many)]
    parts += [np.tile(last, len(task)), np.tile(when, len(task))]
    in_time = ends_s[None, :] >= (work.arrivals + work.least_s)[:, None] * (1 - 1e-9)
    here = ends_s[None, :] > work.arrivals[:, None]
    keep = in_time[parts[0], parts[2]] & here[parts[0], parts[3]]
    way_task, way_last = np.nonzero(in_time)
    return Parts(*(part[keep] for part in parts)), (way_task, way_last)


def _add_devices(
    program: Program, work: Workload, modes: Modes, lengths: Floats, parts: Parts, h: Ints
) -> None:
    """Per interval: devices give time to groups, and groups give it to their members' modes."""
    number, _, _, rate = work.members()
    kinds = np.array([kind for kind, _, _ in work.groups])
    gangs, times = work.gangs(), len(lengths)
    device_time = program.columns(np.zeros(len(work.groups) * times)).reshape(-1, times)
    capacity = program.at_most(np.outer(work.counts, lengths).ravel()).reshape(-1, times)
    supply = program.equal(np.zeros(len(modes.rows) * times)).reshape(-1, times)
    # Time at a member's own speed counts as less time at the fastest of its level.
    worth = rate / modes.speeds[modes.of_member]
    for t in range(times):
        program.add(capacity[kinds, t], device_time[:, t], gangs)
        program.add(supply[modes.of_member, t], device_time[number, t], worth)
    program.add(supply[parts.mode, parts.when], h, -np.ones(len(parts)))
