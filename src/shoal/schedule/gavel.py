"""Reads the trace and throughput formats of Gavel (OSDI 2020).

Trace: tab-separated lines without a header: job type, command, working directory, argument for
the number of steps, needs data, total steps, devices, priority weight, seconds to the deadline
(negative: none), arrival in seconds. Table: JSON `{kind: {"('type', devices)": {"null": steps/s,
"('other', devices)": [steps/s of self, steps/s of other]}}}`; zeros say: cannot run (together).
"""

from __future__ import annotations

import ast
import math
from pathlib import Path

import msgspec
import numpy as np

from shoal.schedule.model import GANG_DEVICES_MAX, InputError, Task, Trace
from shoal.schedule.throughputs import Group, Throughputs

COLUMNS = (
    "job_type",
    "command",
    "working_dir",
    "num_steps_arg",
    "needs_data_dir",
    "total_steps",
    "scale_factor",
    "priority_weight",
    "SLO",
    "arrival_s",
)


def is_trace(text: str) -> bool:
    """Does the first line look like a Gavel trace?"""
    first = text.split("\n", 1)[0]
    return first.count("\t") >= 5


def read_trace(path: Path) -> Trace:
    """The tasks of a Gavel trace, in file order."""
    tasks, lines = [], []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip():
            tasks.append(_task(str(path), number, line.split("\t")))
            lines.append(number)
    return Trace(tasks, str(path), lines)


def _task(file: str, line: int, cells: list[str]) -> Task:
    if len(cells) != len(COLUMNS):
        missing = COLUMNS[len(cells)] if len(cells) < len(COLUMNS) else "line"
        problem = f"{len(cells)} columns instead of {len(COLUMNS)}"
        raise InputError(file, line, missing, problem)

    def number(column: str, least: float) -> float:
        text = cells[COLUMNS.index(column)]
        try:
            value = float(text)
        except ValueError:
            raise InputError(file, line, column, f"{text!r} is no number") from None
        if not math.isfinite(value) or value < least:
            raise InputError(file, line, column, f"{text!r} must be at least {least:g}")
        return value

    slack_s = number("SLO", -math.inf)
    devices = number("scale_factor", 1)
    if devices != int(devices) or devices > GANG_DEVICES_MAX:
        raise InputError(file, line, "scale_factor", f"{devices:g} is no number of devices")
    steps = number("total_steps", 0)
    if steps == 0:
        raise InputError(file, line, "total_steps", "a task needs at least one step")
    weight = number("priority_weight", 0)
    if weight == 0:
        raise InputError(file, line, "priority_weight", "must be above 0")
    return Task(
        name=f"{line}: {cells[0]}",
        type=cells[0],
        steps=steps,
        arrival_s=number("arrival_s", 0),
        devices=int(devices),
        weight=weight,
        deadline_s=slack_s if slack_s > 0 else None,
    )


def is_table(text: str) -> bool:
    """Does this text look like a Gavel throughput table?"""
    return text.lstrip().startswith("{") and '"null"' in text[:4000]


def read_table(path: Path) -> Throughputs:
    """The table; kinds of spread-out gangs (`*_unconsolidated`) are left out."""
    file = str(path)
    try:
        raw = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, dict[str, object]]])
    except msgspec.DecodeError as error:
        raise InputError(file, 1, "table", str(error)) from None
    kinds = tuple(kind for kind in raw if not kind.endswith("_unconsolidated"))
    rows = sorted({_row(file, kind, key) for kind in kinds for key in raw[kind]})
    row_of = {row: index for index, row in enumerate(rows)}
    alone = np.zeros((len(rows), len(kinds)))
    measured: dict[tuple[int, Group], tuple[float, ...]] = {}
    for number, kind in enumerate(kinds):
        for key, beside in raw[kind].items():
            row = row_of[_row(file, kind, key)]
            for other, value in beside.items():
                field = f"{kind}.{key}.{other}"
                if other == "null":
                    alone[row, number] = _speed(file, field, value)
                    continue
                if not isinstance(value, list) or len(value) != 2:
                    raise InputError(file, 1, field, f"{value!r} is no pair of speeds")
                mine, theirs = (_speed(file, field, v) for v in value)
                partner = row_of.get(_row(file, kind, other))
                if partner is not None:
                    in_order = (mine, theirs) if row <= partner else (theirs, mine)
                    measured[number, (min(row, partner), max(row, partner))] = in_order
    return Throughputs(kinds, rows, alone, measured=measured, source=file)


def _row(file: str, kind: str, key: str) -> tuple[str, int]:
    try:
        name, devices = ast.literal_eval(key)
        return str(name), int(devices)
    except (ValueError, SyntaxError, TypeError):
        raise InputError(file, 1, f"{kind}.{key}", "is no ('type', devices)") from None


def _speed(file: str, field: str, value: object) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise InputError(file, 1, field, f"{value!r} is no speed in steps/s")
    return float(value)
