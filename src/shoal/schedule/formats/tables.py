"""Shoal's own formats for traces and throughput tables: CSV with a header, one fact per line.

Trace: `name,type,steps,arrival_s` and, where wanted, `devices,weight,deadline_s,kinds,owner`
(`kinds` separated by blanks: any of them).

Throughputs: `kind,type,devices,steps_per_s` and, where known, `memory` (of each device, as 6GiB),
`compute_busy` and `bandwidth_busy` (share of the device that the task keeps busy alone, 0 to 1;
with both, groups of any size are predicted) and `beside` (types separated by blanks: then the line
is a measured speed beside them, and overrules predictions).

Lines that start with # are comments. An error names the file, the line and the field.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from shoal.schedule.formats import gavel
from shoal.schedule.formats.checked_text import (
    SHOWN_CHARS_MAX,
    SPEED_MAX,
    SPEED_MIN,
    STEPS_MAX,
    STEPS_MIN,
    TIME_MAX_S,
    TIME_MIN_S,
    WEIGHT_MAX,
    WEIGHT_MIN,
    Place,
    read_text,
    shown,
)
from shoal.schedule.model.entities import InputError, Pool, Task, Trace
from shoal.schedule.model.throughputs import Group, Throughputs
from shoal.units import parse_bytes, show_bytes

TRACE_COLUMNS = ("name", "type", "steps", "arrival_s")
TRACE_OPTIONAL = ("devices", "weight", "deadline_s", "kinds", "owner")
TABLE_COLUMNS = ("kind", "type", "devices", "steps_per_s")
TABLE_OPTIONAL = ("memory", "compute_busy", "bandwidth_busy", "beside")


class _Line:
    """One line of a CSV file, with checked access to its fields."""

    def __init__(self, file: str, number: int, cells: dict[str, str]) -> None:
        self.file, self.number, self.cells = file, number, cells

    def error(self, field: str, problem: str) -> InputError:
        return InputError(self.file, self.number, field, problem)

    def get(self, field: str) -> str:
        """Return the cell, or "" if the file does not have the column."""
        return self.cells.get(field, "").strip()

    def text(self, field: str) -> str:
        value = self.get(field)
        if not value:
            raise self.error(field, "is empty")
        return value

    def number_of(self, field: str, least: float, most: float, default: str = "") -> float:
        place = Place(self.file, self.number, field)
        return place.number(self.get(field) or default, least, most)

    def devices(self) -> int:
        return Place(self.file, self.number, "devices").devices(self.get("devices") or "1")

    def speed(self) -> float:
        place = Place(self.file, self.number, "steps_per_s")
        value = self.get("steps_per_s")
        return place.speed(place.number(value, 0.0, SPEED_MAX), shown(value))


def _cells(file: str, number: int, line: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise InputError(file, number, "line", f"is not CSV: {error}") from None


def _lines(
    file: str, text: str, columns: tuple[str, ...], optional: tuple[str, ...]
) -> Iterator[_Line]:
    """Read the lines of a CSV text. Its header has all of `columns` once, and no others."""
    numbered = [
        (number, line)
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip() and not line.startswith("#")
    ]
    if not numbered:
        raise InputError(file, 1, "header", "the file is empty")
    first, header_line = numbered[0]
    header = [name.strip() for name in _cells(file, first, header_line)]
    for name in columns:
        if name not in header:
            problem = f"column is missing; header: {shown(header_line)}"
            raise InputError(file, first, name, problem)
    for place, name in enumerate(header):
        if name not in columns + optional:
            known = ", ".join(columns + optional)
            raise InputError(
                file, first, name[:SHOWN_CHARS_MAX] or "header", f"unknown column; known: {known}"
            )
        if name in header[:place]:
            raise InputError(file, first, name, "this column is there twice")
    for number, line in numbered[1:]:
        cells = _cells(file, number, line)
        if len(cells) != len(header):
            missing = header[len(cells)] if len(cells) < len(header) else header[-1]
            problem = f"{len(cells)} columns instead of {len(header)}"
            raise InputError(file, number, missing, problem)
        yield _Line(file, number, dict(zip(header, cells, strict=True)))


def read_trace(path: Path) -> Trace:
    """Read a trace in Shoal's or Gavel's format."""
    file, text = str(path), read_text(path)
    if gavel.is_trace(text):
        return gavel.read_trace(file, text)
    tasks: list[Task] = []
    line_of: dict[str, int] = {}
    for line in _lines(file, text, TRACE_COLUMNS, TRACE_OPTIONAL):
        task = _task(line)
        before = line_of.setdefault(task.name, line.number)
        if before != line.number:
            raise line.error("name", f"{shown(task.name)} is the task of line {before} already")
        tasks.append(task)
    if not tasks:
        raise InputError(file, 1, "name", "the trace has no tasks")
    return Trace(tasks, file, list(line_of.values()))


def _task(line: _Line) -> Task:
    kinds = line.get("kinds").split()
    deadline_s = None
    if line.get("deadline_s"):
        deadline_s = line.number_of("deadline_s", TIME_MIN_S, TIME_MAX_S)
    return Task(
        name=line.text("name"),
        type=line.text("type"),
        steps=line.number_of("steps", STEPS_MIN, STEPS_MAX),
        arrival_s=line.number_of("arrival_s", 0.0, TIME_MAX_S),
        devices=line.devices(),
        weight=line.number_of("weight", WEIGHT_MIN, WEIGHT_MAX, "1"),
        deadline_s=deadline_s,
        kinds=frozenset(kinds) if kinds else None,
        owner=line.get("owner"),
    )


def read_table(path: Path) -> Throughputs:
    """Read a throughput table in Shoal's or Gavel's format."""
    file, text = str(path), read_text(path)
    if gavel.is_table(text):
        return gavel.read_table(file, text)
    lines = list(_lines(file, text, TABLE_COLUMNS, TABLE_OPTIONAL))
    if not lines:
        raise InputError(file, 1, "kind", "the table has no lines")
    kinds = tuple(dict.fromkeys(line.text("kind") for line in lines))
    rows = sorted({(line.text("type"), line.devices()) for line in lines})
    row_of = {row: number for number, row in enumerate(rows)}
    alone = np.zeros((len(rows), len(kinds)))
    memory_bytes = np.zeros(alone.shape)
    busy = np.full((*alone.shape, 2), np.nan)
    beside: dict[tuple[int, int, tuple[str, ...]], tuple[float, _Line]] = {}
    seen: dict[tuple[int, int, tuple[str, ...]], int] = {}
    for line in lines:
        row, kind = row_of[line.text("type"), line.devices()], kinds.index(line.text("kind"))
        speed = line.speed()
        partners = tuple(sorted(line.get("beside").split()))
        before = seen.setdefault((kind, row, partners), line.number)
        if before != line.number:
            raise line.error("type", f"line {before} has this type, devices and kind already")
        if partners:
            beside[kind, row, partners] = (speed, line)
            continue
        alone[row, kind] = speed
        memory_bytes[row, kind] = _memory(line)
        for place, name in enumerate(("compute_busy", "bandwidth_busy")):
            if line.get(name):
                busy[row, kind, place] = line.number_of(name, 0.0, 1.0)
    measured = _measured(rows, row_of, beside)
    return Throughputs(kinds, rows, alone, memory_bytes, busy, measured, file)


def _memory(line: _Line) -> int:
    text = line.get("memory")
    try:
        size_bytes = parse_bytes(text) if text else 0
    except ValueError as error:
        raise line.error("memory", str(error)) from None
    return size_bytes


def _measured(
    rows: list[tuple[str, int]],
    row_of: dict[tuple[str, int], int],
    beside: dict[tuple[int, int, tuple[str, ...]], tuple[float, _Line]],
) -> dict[tuple[int, Group], tuple[float, ...]]:
    """Lines `type beside others` to groups; every member of a group needs its line."""
    measured: dict[tuple[int, Group], tuple[float, ...]] = {}
    for (kind, row, partners), (_, line) in beside.items():
        devices = rows[row][1]
        for partner in partners:
            if (partner, devices) not in row_of:
                raise line.error(
                    "beside", f"{partner!r} on {devices} devices is not a row of the table"
                )
        group = tuple(sorted([row, *(row_of[partner, devices] for partner in partners)]))
        names = [rows[member][0] for member in group]
        speeds = []
        for place, member in enumerate(group):
            others = tuple(sorted(names[:place] + names[place + 1 :]))
            if (kind, member, others) not in beside:
                raise line.error("beside", f"no line for {names[place]!r} beside {others}")
            speeds.append(beside[kind, member, others][0])
        measured[kind, group] = tuple(speeds)
    return measured


def write_trace(path: Path, tasks: Iterable[Task]) -> None:
    """Write a trace in Shoal's format."""
    with path.open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(TRACE_COLUMNS + TRACE_OPTIONAL)
        for task in tasks:
            deadline = "" if task.deadline_s is None else f"{task.deadline_s:g}"
            kinds = " ".join(sorted(task.kinds or ()))
            row = [task.name, task.type, f"{task.steps:.10g}", f"{task.arrival_s:.10g}"]
            writer.writerow([*row, task.devices, f"{task.weight:g}", deadline, kinds, task.owner])


def check_trace(
    trace: Trace, table: Throughputs, pool: Pool, *, may_never_run: bool = False
) -> None:
    """Raise `InputError` unless every task can run in the pool and every kind is known.

    With `may_never_run` tasks may be too large for the pool, for those who ask why they wait.
    """
    for kind in pool.kinds:
        if kind.name not in table.kinds:
            known = ", ".join(table.kinds)
            raise InputError(table.source, 1, "kind", f"{kind.name!r} is unknown; known: {known}")
    chosen = table.select(pool.names)
    for task, line in zip(trace.tasks, trace.lines, strict=True):
        row = chosen.row_of.get((task.type, task.devices))
        if row is None:
            problem = f"{task.type!r} on {task.devices} devices is not in {table.source}"
            raise InputError(trace.file, line, "type", problem)
        for name in task.kinds or ():
            if name not in table.kinds:
                problem = f"{name!r} is in no line of {table.source}"
                raise InputError(trace.file, line, "kinds", problem)
        if may_never_run:
            continue
        quota = pool.quotas.get(task.owner, task.devices)
        if task.devices > quota:
            problem = f"{task.devices} are more than the quota of {task.owner!r}: {quota}"
            raise InputError(trace.file, line, "devices", problem)
        lasts_s = task.steps / max(chosen.best[row], SPEED_MIN)
        if chosen.best[row] > 0 and lasts_s > TIME_MAX_S:
            problem = f"the fastest kind needs {lasts_s:.3g} s, more than {TIME_MAX_S:g}"
            raise InputError(trace.file, line, "steps", problem)
        problems = _why_not(task, row, chosen, pool)
        if len(problems) == len(pool.kinds):
            field = "memory" if any("memory" in p for p in problems) else "devices"
            problem = f"task {task.name!r} fits nowhere: {'; '.join(problems)}"
            raise InputError(trace.file, line, field, problem)


def _why_not(task: Task, row: int, table: Throughputs, pool: Pool) -> list[str]:
    """Say for each kind on which the task can never run, why."""
    problems = []
    for place, kind in enumerate(pool.kinds):
        if task.kinds is not None and kind.name not in task.kinds:
            problems.append(f"{kind.name}: not asked for")
        elif table.alone[row, place] <= 0:
            problems.append(f"{kind.name}: does not run there")
        elif task.devices > kind.count:
            problems.append(f"{kind.name}: only {kind.count} devices")
        elif not table.fits(place, (row,), kind.memory_bytes):
            need, has = table.memory_bytes[row, place], kind.memory_bytes
            shown_sizes = f"needs {show_bytes(need)} of memory, a device has {show_bytes(has)}"
            problems.append(f"{kind.name}: {shown_sizes}")
    return problems
