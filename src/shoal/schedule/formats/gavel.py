"""Reads the trace and throughput formats of Gavel (OSDI 2020).

Trace: tab-separated lines without a header: job type, command, working directory, argument for
the number of steps, needs data, total steps, devices, priority weight, seconds to the deadline
(negative: none), arrival in seconds. Table: JSON `{kind: {"('type', devices)": {"null": steps/s,
"('other', devices)": [steps/s of self, steps/s of other]}}}`; zeros say: cannot run (together).
"""

from __future__ import annotations

import json
import re
from typing import TypeGuard

import numpy as np

from shoal.schedule.formats.checked_text import (
    SPEED_MAX,
    SPEED_MIN,
    STEPS_MAX,
    STEPS_MIN,
    TIME_MAX_S,
    WEIGHT_MAX,
    WEIGHT_MIN,
    Place,
    shown,
)
from shoal.schedule.model.entities import InputError, Task, Trace
from shoal.schedule.model.throughputs import Group, Throughputs

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
_ROW = re.compile(r"""\(\s*(['"])(.*)\1\s*,\s*(\d{1,9})\s*\)""", re.ASCII)


def is_trace(text: str) -> bool:
    """Return whether the first non-empty line looks like a Gavel trace."""
    first = text.lstrip("\n").split("\n", 1)[0]
    return first.count("\t") >= 5


def read_trace(file: str, text: str) -> Trace:
    """Read the tasks of a Gavel trace, in file order."""
    tasks, lines = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            tasks.append(_task(file, number, line.split("\t")))
            lines.append(number)
    if not tasks:
        raise InputError(file, 1, COLUMNS[0], "the trace has no tasks")
    return Trace(tasks, file, lines)


def _task(file: str, line: int, cells: list[str]) -> Task:
    if len(cells) != len(COLUMNS):
        missing = COLUMNS[len(cells)] if len(cells) < len(COLUMNS) else "line"
        problem = f"{len(cells)} columns instead of {len(COLUMNS)}"
        raise InputError(file, line, missing, problem)
    if not cells[0].strip():
        raise InputError(file, line, COLUMNS[0], "is empty")

    def number(column: str, least: float, most: float) -> float:
        return Place(file, line, column).number(cells[COLUMNS.index(column)], least, most)

    slack_s = number("SLO", -TIME_MAX_S, TIME_MAX_S)
    scale = Place(file, line, "scale_factor").devices(cells[COLUMNS.index("scale_factor")])
    return Task(
        name=f"{line}: {cells[0]}",
        type=cells[0],
        steps=number("total_steps", STEPS_MIN, STEPS_MAX),
        arrival_s=number("arrival_s", 0.0, TIME_MAX_S),
        devices=scale,
        weight=number("priority_weight", WEIGHT_MIN, WEIGHT_MAX),
        deadline_s=slack_s if slack_s > 0 else None,
    )


def is_table(text: str) -> bool:
    """Return whether this text looks like a Gavel throughput table. No CSV header begins like that."""
    return text.lstrip().startswith("{")


def read_table(file: str, text: str) -> Throughputs:
    """Read the table, without the kinds of spread-out gangs (`*_unconsolidated`)."""
    raw = _decode(file, text)
    kinds = tuple(kind for kind in raw if not kind.endswith("_unconsolidated"))
    if not kinds:
        raise InputError(file, 1, "table", "names no kind of device")
    rows_of = {
        (kind, key): _row(_place(file, text, kind, key), key) for kind in kinds for key in raw[kind]
    }
    rows = sorted(set(rows_of.values()))
    row_of = {row: index for index, row in enumerate(rows)}
    alone = np.zeros((len(rows), len(kinds)))
    measured: dict[tuple[int, Group], tuple[float, ...]] = {}
    for number, kind in enumerate(kinds):
        for key, beside in raw[kind].items():
            row = row_of[rows_of[kind, key]]
            if "null" not in beside:
                raise _place(file, text, kind, key, "null").error("the speed alone is missing")
            for other, value in beside.items():
                # Looked for only when there is something to say: a table has many thousand values.
                if other == "null":
                    if not _is_speed(value):
                        raise _place(file, text, kind, key, other).error(_no_speed(value))
                    alone[row, number] = value
                    continue
                pair = value if isinstance(value, list) and len(value) == 2 else None
                if pair is None or not all(map(_is_speed, pair)):
                    raise _place(file, text, kind, key, other).error(
                        _no_speed(value, "pair of speeds")
                    )
                partner = row_of.get(_row(_place(file, text, kind, key, other), other))
                if partner is not None:
                    in_order = (pair[0], pair[1]) if row <= partner else (pair[1], pair[0])
                    members = (min(row, partner), max(row, partner))
                    measured[number, members] = (float(in_order[0]), float(in_order[1]))
    return Throughputs(kinds, rows, alone, measured=measured, source=file)


Table = dict[str, dict[str, dict[str, object]]]


def _decode(file: str, text: str) -> Table:
    """The JSON, as far as its shape goes: objects of objects of objects, no key twice."""
    try:
        raw = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise InputError(file, error.lineno, "table", f"is not JSON: {error.msg}") from None
    except _TwiceError as error:
        line = (
            text.count("\n", 0, max(0, text.rfind(json.dumps(error.key, ensure_ascii=False)))) + 1
        )
        raise InputError(file, line, shown(error.key), "this key is there twice") from None
    except (RecursionError, ValueError) as error:
        raise InputError(file, 1, "table", f"is not JSON that can be used: {error}") from None
    for kind, rows in raw.items():
        if not isinstance(rows, dict):
            raise _place(file, text, kind).error("is not an object of types")
        for key, beside in rows.items():
            if not isinstance(beside, dict):
                raise _place(file, text, kind, key).error("is not an object of speeds")
    found: Table = raw
    return found


class _TwiceError(Exception):
    def __init__(self, key: str) -> None:
        self.key = key


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _TwiceError(next(key for place, key in enumerate(keys) if key in keys[:place]))
    return found


class _KeyPlace(Place):
    """A value in a table: its line is found by its keys, when an error has to name it."""

    def __init__(self, file: str, text: str, keys: tuple[str, ...]) -> None:
        super().__init__(file, 1, ".".join(shown(key).strip("'\"") for key in keys))
        self._text, self._keys = text, keys

    def error(self, problem: str) -> InputError:
        at = 0
        for depth, key in enumerate(self._keys):
            begins = r"\s*:\s*\{" if depth < 2 else r"\s*:"  # a kind and a type hold objects
            pattern = re.compile(re.escape(json.dumps(key, ensure_ascii=False)) + begins)
            found = pattern.search(self._text, at)
            at = found.start() if found else at
        self.line = self._text.count("\n", 0, at) + 1
        return super().error(problem)


def _place(file: str, text: str, *keys: str) -> _KeyPlace:
    return _KeyPlace(file, text, keys)


def _row(place: Place, key: str) -> tuple[str, int]:
    """Return the row that "('type', devices)" names."""
    found = _ROW.fullmatch(key)
    if found is None:
        raise place.error("is not ('type', devices)")
    return found[2], place.devices(found[3])


def _is_speed(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == 0 or SPEED_MIN <= value <= SPEED_MAX


def _no_speed(value: object, what: str = "speed") -> str:
    bounds = f"{SPEED_MIN:g} to {SPEED_MAX:g}"
    return f"{shown(str(value))} is no {what}; a speed is 0, or steps/s from {bounds}"
