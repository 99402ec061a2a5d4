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
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from shoal.schedule import gavel
from shoal.schedule.model import GANG_DEVICES_MAX, InputError, Pool, Task, Trace, parse_bytes
from shoal.schedule.throughputs import Group, Throughputs

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

    def text(self, field: str) -> str:
        value = self.cells.get(field, "").strip()
        if not value:
            raise self.error(field, "is empty")
        return value

    def number_of(self, field: str, default: float | None = None, least: float = 0.0) -> float:
        value = self.cells.get(field, "").strip()
        if not value and default is not None:
            return default
        try:
            number = float(value)
        except ValueError:
            raise self.error(field, f"{value!r} is no number") from None
        if not math.isfinite(number) or number < least:
            raise self.error(field, f"{value!r} must be a finite number of at least {least:g}")
        return number

    def above_zero(self, field: str, default: float | None = None) -> float:
        number = self.number_of(field, default)
        if number == 0:
            raise self.error(field, "must be above 0")
        return number

    def devices(self) -> int:
        number = self.number_of("devices", 1.0, 1.0)
        if number != int(number) or number > GANG_DEVICES_MAX:
            raise self.error("devices", f"{number:g} is no number of devices")
        return int(number)


def _lines(path: Path, columns: tuple[str, ...], optional: tuple[str, ...]) -> Iterator[_Line]:
    """The lines of a CSV file whose header has all of `columns` and nothing unknown."""
    file = str(path)
    numbered = [
        (number, line)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if line.strip() and not line.startswith("#")
    ]
    if not numbered:
        raise InputError(file, 1, "header", "the file is empty")
    first, header_line = numbered[0]
    header = [name.strip() for name in next(csv.reader([header_line]))]
    for name in columns:
        if name not in header:
            raise InputError(file, first, name, f"column is missing; header: {header_line!r}")
    for name in header:
        if name not in columns + optional:
            raise InputError(file, first, name, f"unknown column; known: {columns + optional}")
    for number, line in numbered[1:]:
        cells = next(csv.reader([line]))
        if len(cells) != len(header):
            missing = header[len(cells)] if len(cells) < len(header) else header[-1]
            problem = f"{len(cells)} columns instead of {len(header)}"
            raise InputError(file, number, missing, problem)
        yield _Line(file, number, dict(zip(header, cells, strict=True)))


def read_trace(path: Path) -> Trace:
    """A trace in Shoal's or Gavel's format, whichever it is."""
    text = path.read_text()
    if gavel.is_trace(text):
        return gavel.read_trace(path)
    tasks, lines = [], []
    for line in _lines(path, TRACE_COLUMNS, TRACE_OPTIONAL):
        lines.append(line.number)
        deadline = line.cells.get("deadline_s", "").strip()
        kinds = line.cells.get("kinds", "").split()
        tasks.append(
            Task(
                name=line.text("name"),
                type=line.text("type"),
                steps=line.above_zero("steps"),
                arrival_s=line.number_of("arrival_s"),
                devices=line.devices(),
                weight=line.above_zero("weight", 1.0),
                deadline_s=line.above_zero("deadline_s") if deadline else None,
                kinds=frozenset(kinds) if kinds else None,
                owner=line.cells.get("owner", "").strip(),
            )
        )
    if not tasks:
        raise InputError(str(path), 1, "name", "there is no task in the trace")
    return Trace(tasks, str(path), lines)


def read_table(path: Path) -> Throughputs:
    """A throughput table in Shoal's or Gavel's format, whichever it is."""
    if gavel.is_table(path.read_text()):
        return gavel.read_table(path)
    lines = list(_lines(path, TABLE_COLUMNS, TABLE_OPTIONAL))
    kinds = tuple(dict.fromkeys(line.text("kind") for line in lines))
    rows = sorted({(line.text("type"), line.devices()) for line in lines})
    row_of = {row: number for number, row in enumerate(rows)}
    alone = np.zeros((len(rows), len(kinds)))
    memory_bytes = np.zeros(alone.shape)
    busy = np.full((*alone.shape, 2), np.nan)
    beside: dict[tuple[int, int, tuple[str, ...]], tuple[float, _Line]] = {}
    for line in lines:
        row, kind = row_of[line.text("type"), line.devices()], kinds.index(line.text("kind"))
        speed = line.number_of("steps_per_s")
        partners = tuple(sorted(line.cells.get("beside", "").split()))
        if partners:
            beside[kind, row, partners] = (speed, line)
            continue
        if alone[row, kind] > 0:
            raise line.error("type", "this type, device count and kind were given before")
        alone[row, kind] = speed
        memory_bytes[row, kind] = _memory(line)
        for place, name in enumerate(("compute_busy", "bandwidth_busy")):
            if line.cells.get(name, "").strip():
                busy[row, kind, place] = _share(line, name)
    measured = _measured(rows, row_of, beside)
    return Throughputs(kinds, rows, alone, memory_bytes, busy, measured, str(path))


def _memory(line: _Line) -> int:
    text = line.cells.get("memory", "").strip()
    try:
        return parse_bytes(text) if text else 0
    except ValueError as error:
        raise line.error("memory", str(error)) from None


def _share(line: _Line, name: str) -> float:
    share = line.number_of(name)
    if share > 1:
        raise line.error(name, f"{share:g} is more than all of the device")
    return share


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
                raise line.error("beside", f"{partner!r} on {devices} devices is no row")
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


def check_trace(trace: Trace, table: Throughputs, pool: Pool) -> None:
    """Every task can run somewhere in the pool, and every kind is known; else `InputError`."""
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
        quota = pool.quotas.get(task.owner, task.devices)
        if task.devices > quota:
            problem = f"{task.devices} are more than the quota of {task.owner!r}: {quota}"
            raise InputError(trace.file, line, "devices", problem)
        problems = _why_not(task, row, chosen, pool)
        if len(problems) == len(pool.kinds):
            field = "memory" if any("memory" in p for p in problems) else "devices"
            problem = f"task {task.name!r} fits nowhere: {'; '.join(problems)}"
            raise InputError(trace.file, line, field, problem)


def _why_not(task: Task, row: int, table: Throughputs, pool: Pool) -> list[str]:
    """For each kind on which the task can never run, why."""
    problems = []
    for place, kind in enumerate(pool.kinds):
        if task.kinds is not None and kind.name not in task.kinds:
            problems.append(f"{kind.name}: not asked for")
        elif table.alone[row, place] <= 0:
            problems.append(f"{kind.name}: does not run there")
        elif task.devices > kind.count:
            problems.append(f"{kind.name}: only {kind.count} devices")
        elif not table.fits(place, (row,), kind.memory_bytes):
            need = int(table.memory_bytes[row, place])
            problems.append(f"{kind.name}: needs {need} of {kind.memory_bytes} bytes of memory")
    return problems
