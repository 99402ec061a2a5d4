"""What a task's work costs the pool, in seconds of the whole pool.

The prices are the duals of the least time in which all present work can be done. With y the price
of a task, doing a part of it saves that part of y pool seconds, wherever it is done efficiently.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.schedule.allocator.policy import View
from shoal.schedule.allocator.solver import Program, sums
from shoal.schedule.allocator.task_classes import Classes, Ints
from shoal.schedule.model.throughputs import Floats, Group

#: Groups considered on one kind, those that gain most first.
GROUPS_MAX = 100
#: Longest classes that are watched one by one when the last finish is priced.
CRITICAL_MAX = 80


@dataclass(frozen=True, slots=True)
class Groups:
    """Ways to use a kind's devices: single rows, and groups of rows that gain together."""

    kinds: Ints
    groups: list[Group]
    rates: list[tuple[float, ...]]
    gangs: Floats
    # One entry per (group, member):
    member_group: Ints
    member_kind: Ints
    member_row: Ints
    member_rate: Floats


def find_groups(view: View, rows: Ints) -> Groups:
    """Return all ways in which the pool can run tasks of these rows."""
    present = sorted(set(rows.tolist()))
    found: list[tuple[int, Group, tuple[float, ...]]] = []
    for kind, place in enumerate(view.pool.kinds):
        singles: list[Group] = [(row,) for row in present]
        shared = view.table.groups(kind, present, place.memory_bytes, view.together_max)
        if len(shared) > GROUPS_MAX:
            shared = sorted(shared, key=lambda g: (-view.table.gain(kind, g), g))[:GROUPS_MAX]
        for group in singles + shared:
            rates = view.table.rates(kind, group)
            if rates is not None and view.table.rows[group[0]][1] <= place.count:
                found.append((kind, group, rates))
    flat = [
        (number, kind, row, rate)
        for number, (kind, group, rates) in enumerate(found)
        for row, rate in zip(group, rates, strict=True)
    ]
    columns = [np.array([entry[i] for entry in flat], dtype=np.int64) for i in range(3)]
    return Groups(
        kinds=np.array([kind for kind, _, _ in found], dtype=np.int64),
        groups=[group for _, group, _ in found],
        rates=[rates for _, _, rates in found],
        gangs=np.array([float(view.table.rows[g[0]][1]) for _, g, _ in found]),
        member_group=columns[0],
        member_kind=columns[1],
        member_row=columns[2],
        member_rate=np.array([entry[3] for entry in flat]),
    )


@dataclass(frozen=True, slots=True)
class PoolPrices:
    """`least_s`: least time for all work. `task_s`: its share of one task of each class."""

    least_s: float
    task_s: Floats


def price(view: View, classes: Classes, groups: Groups, critical: bool) -> PoolPrices:
    """Price the work of each class.

    Without `critical` only capacity counts. With it no task may be split over devices that run at
    the same time, so a task too long for the horizon becomes dear whatever the load.
    """
    speeds = class_speeds(view, classes)
    item_of, item_class = _items(classes, speeds, critical)
    count = len(item_class)
    work = Work(
        rows=classes.rows[item_class],
        steps=sums(item_of, classes.count * classes.steps, count),
        speeds=speeds[item_class],
        tasks=sums(item_of, classes.count, count),
    )
    program = Program()
    finished = program.equal(np.ones(count))
    add_horizon(program, view, groups, work, finished, 1.0, critical)
    solution = program.solve()
    assert solution is not None, "with time enough, all work is feasible"
    per_step = np.maximum(solution.prices[finished], 0.0) / work.steps
    return PoolPrices(solution.objective, per_step[item_of] * classes.steps)


@dataclass(frozen=True, slots=True)
class Work:
    """Work to be done by a common end. `steps` belong to one unit of the row `finished`."""

    rows: Ints
    steps: Floats
    speeds: Floats  # (items, kinds) steps/s alone.
    tasks: Floats  # How many tasks can run at once.


def add_horizon(
    program: Program,
    view: View,
    groups: Groups,
    work: Work,
    finished: Ints,
    weight: float,
    critical: bool,
) -> Ints:
    """Add to a program: the rest of the work, and the time T in which it can be done.

    Args:
        finished: A row for each item; the part of it that is left to T is added to the row.
        weight: Cost of a second of T.

    Returns:
        The column of T.
    """
    kinds_count, rows_count = len(view.pool.kinds), len(view.table.rows)
    counts = np.array([float(kind.count) for kind in view.pool.kinds])
    horizon = program.columns(np.array([weight]))
    device_time = program.columns(np.zeros(len(groups.groups)))
    item, kind = np.nonzero(work.speeds > 0)
    done = program.columns(np.zeros(len(item)))
    program.add(finished[item], done, np.ones(len(item)))
    capacity = program.at_most(np.zeros(kinds_count))
    program.add(capacity[groups.kinds], device_time, groups.gangs)
    program.add(capacity, np.repeat(horizon, kinds_count), -counts)
    supply = program.equal(np.zeros(rows_count * kinds_count))
    slot = groups.member_row * kinds_count + groups.member_kind
    program.add(supply[slot], device_time[groups.member_group], groups.member_rate)
    program.add(supply[work.rows[item] * kinds_count + kind], done, -work.steps[item])
    if critical:
        busy = program.at_most(np.zeros(len(work.steps)))
        program.add(busy[item], done, work.steps[item] / work.speeds[item, kind])
        program.add(busy, np.repeat(horizon, len(busy)), -work.tasks)
        present = sums(work.rows, work.tasks, rows_count)
        slots = program.at_most(np.zeros(rows_count))
        one = np.ones(len(groups.member_row))
        program.add(slots[groups.member_row], device_time[groups.member_group], one)
        program.add(slots, np.repeat(horizon, rows_count), -present)
    return horizon


def class_speeds(view: View, classes: Classes) -> Floats:
    """Return steps/s of each class alone on each kind; 0: it may not run there."""
    return np.where(classes.allowed, view.table.alone[classes.rows], 0.0)


def _items(classes: Classes, speeds: Floats, critical: bool) -> tuple[Ints, Ints]:
    """Classes to items of the program: item of each class, and a class of each item.

    Classes of one row with the same kinds are one item; the longest stay apart if `critical`.
    """
    apart: set[int] = set()
    if critical:
        least_s = classes.longest / speeds.max(axis=1)
        apart = set(np.argsort(-least_s, kind="stable")[:CRITICAL_MAX].tolist())
    number_of: dict[tuple[int, ...], int] = {}
    item_of = []
    item_class: list[int] = []
    for number in range(len(classes)):
        mask = int(np.packbits(classes.allowed[number], bitorder="little").tobytes().hex(), 16)
        key = (int(classes.rows[number]), mask, number if number in apart else -1)
        if key not in number_of:
            number_of[key] = len(item_class)
            item_class.append(number)
        item_of.append(number_of[key])
    return np.array(item_of), np.array(item_class)
