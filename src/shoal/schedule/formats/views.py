"""Views and plans, from and to the form in which they are written."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from shoal.schedule.allocator.policy import Assignment, Plan, TaskState, View
from shoal.schedule.formats import records
from shoal.schedule.model.entities import POOL_DEVICES_MAX, InputError, Pool
from shoal.schedule.model.throughputs import Floats, Throughputs

ROWS_MAX = 4096
KINDS_MAX = 256
TASKS_MAX = 100_000


def to_fields(view: View) -> records.ViewFields:
    """Return a view as it is written."""
    table = view.table
    return records.ViewFields(
        view.now_s,
        view.round_s,
        view.restart_cost_s,
        view.together_max,
        list(view.pool.kinds),
        dict(view.pool.quotas),
        records.TableFields(
            list(table.kinds),
            list(table.rows),
            table.alone.tolist(),
            table.memory_bytes.tolist(),
            [[_pair(busy) for busy in row] for row in table.busy.tolist()],
            [
                (kind, list(group), list(rates))
                for (kind, group), rates in sorted(table.measured.items())
            ],
            table.unknown_shares,
        ),
        [
            records.TaskFields(
                s.id, s.task, s.row, s.steps_left, s.kind, s.started, s.restart_cost_s
            )
            for s in view.tasks
        ],
    )


def _pair(busy: list[float]) -> tuple[float | None, float | None]:
    compute, memory = (None if math.isnan(value) else value for value in busy)
    return compute, memory


def from_fields(fields: records.ViewFields) -> View:
    """Return the view that was written, after checking it. Raises ValueError."""
    table = _table(fields)
    if sum(kind.count for kind in fields.kinds) > POOL_DEVICES_MAX:
        raise ValueError("the pool has too many devices")
    for kind in fields.kinds:
        if kind.count < 0 or kind.node_devices < 1 or len(kind.nodes) not in (0, kind.count):
            raise ValueError(f"kind {kind.name!r} has a wrong count or node map")
    if len(fields.tasks) > TASKS_MAX:
        raise ValueError(f"a view has at most {TASKS_MAX} tasks, not {len(fields.tasks)}")
    for state in fields.tasks:
        if not 0 <= state.row < len(table.rows) or not state.steps_left >= 0:
            raise ValueError(f"task {state.task.name!r} has a wrong row or number of steps")
        if state.kind is not None and not 0 <= state.kind < len(fields.kinds):
            raise ValueError(f"task {state.task.name!r} runs on a kind that does not exist")
    if len({state.id for state in fields.tasks}) < len(fields.tasks):
        raise ValueError("two tasks have one id")
    return View(
        fields.now_s,
        fields.round_s,
        fields.restart_cost_s,
        Pool(tuple(fields.kinds), dict(fields.quotas)),
        table,
        [
            TaskState(s.id, s.task, s.row, s.steps_left, s.kind, s.started, s.restart_cost_s)
            for s in fields.tasks
        ],
        fields.together_max,
    )


def _table(fields: records.ViewFields) -> Throughputs:
    given = fields.table
    shape = (len(given.rows), len(given.kinds))
    if shape[0] > ROWS_MAX or not 0 < shape[1] <= KINDS_MAX:
        raise ValueError(f"a table of {shape[0]} rows and {shape[1]} kinds is not possible")
    if [kind.name for kind in fields.kinds] != given.kinds:
        raise ValueError("the table's kinds are not the pool's")
    busy = np.array(
        [[[math.nan if v is None else v for v in pair] for pair in row] for row in given.busy],
        dtype=np.float64,
    ).reshape(*shape, 2)
    measured = {}
    for kind, group, rates in given.measured:
        if not 0 <= kind < shape[1] or not group or len(group) != len(rates):
            raise ValueError("a measured group is malformed")
        if not all(0 <= row < shape[0] for row in group) or group != sorted(group):
            raise ValueError("a measured group has rows that do not exist, or in a wrong order")
        measured[kind, tuple(group)] = tuple(rates)
    return Throughputs(
        tuple(given.kinds),
        list(given.rows),
        _matrix(given.alone, shape),
        _matrix(given.memory_bytes, shape),
        busy,
        measured,
        source="record",
        unknown_shares=given.unknown_shares,
    )


def _matrix(values: list[list[float]], shape: tuple[int, int]) -> Floats:
    matrix: Floats = np.array(values, dtype=np.float64).reshape(shape)
    if not np.isfinite(matrix).all() or (matrix < 0).any():
        raise ValueError("the table has values that are not numbers from 0 on")
    return matrix


def plan_to_fields(plan: Plan) -> records.PlanFields:
    return records.PlanFields(
        [(a.kind, list(a.tasks)) for a in plan.assignments], plan.value, plan.bound, plan.notes
    )


def plan_from_fields(fields: records.PlanFields) -> Plan:
    assignments = tuple(Assignment(kind, tuple(tasks)) for kind, tasks in fields.assignments)
    return Plan(assignments, fields.value, fields.bound, dict(fields.notes))


_RECORD = msgspec.json.Decoder(records.Record)


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a record file, also one in a bundle of `shoal dump`."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            yield file
        return
    try:
        with zipfile.ZipFile(path) as bundle, bundle.open(records.BUNDLED) as member:
            yield member
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(str(path), 1, "bundle", str(error)) from None


def read_records(path: Path) -> Iterator[records.Record]:
    """Read a record file, or that of a bundle. Raises `InputError`, which names the line."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            try:
                record = _RECORD.decode(line)
                from_fields(record.question.view)
            except (msgspec.DecodeError, ValueError) as error:
                raise InputError(str(path), number, "record", str(error)) from None
            yield record
