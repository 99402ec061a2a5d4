"""Views and plans as they are written: what the planner is asked, what it answers, what a pool records.

A record file has one round per line, so a live day can be run again by the simulator. Nothing here
imports numpy: the head writes these.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from shoal.schedule.model.entities import Kind, Task

#: The record file in a bundle of `shoal dump`.
BUNDLED = "rounds.jsonl"


class TaskFields(msgspec.Struct, frozen=True):
    """A task that has arrived and is not finished, as `TaskState` says it."""

    id: int
    task: Task
    row: int
    steps_left: float
    kind: int | None = None
    started: bool = False
    restart_cost_s: float | None = None


class TableFields(msgspec.Struct, frozen=True):
    kinds: list[str]
    rows: list[tuple[str, int]]
    alone: list[list[float]]
    memory_bytes: list[list[float]]
    busy: list[list[tuple[float | None, float | None]]]  # None: unknown
    measured: list[tuple[int, list[int], list[float]]]
    unknown_shares: bool


class ViewFields(msgspec.Struct, frozen=True):
    now_s: float
    round_s: float
    restart_cost_s: float
    together_max: int
    kinds: list[Kind]
    quotas: dict[str, int]
    table: TableFields
    tasks: list[TaskFields]


class PlanFields(msgspec.Struct, frozen=True):
    assignments: list[tuple[int, list[int]]]  # kind, tasks
    value: float | None = None
    bound: float | None = None
    notes: dict[str, float] = {}


class Question(msgspec.Struct, frozen=True):
    """Head → planner: what should run now? It holds everything that the policy may know."""

    number: int
    policy: str
    balance: float
    view: ViewFields
    memory: dict[str, Any] = {}  # of the policy, from its last answer


class Answer(msgspec.Struct, frozen=True):
    """Planner → head."""

    number: int  # of the question
    plan: PlanFields | None  # None: the policy failed
    memory: dict[str, Any] = {}
    error: str = ""
    solve_s: float = 0.0


class Record(msgspec.Struct, frozen=True):
    """One round of a live pool: what was asked, and what was carried out."""

    at: float  # Unix time
    question: Question
    carried_out: PlanFields
    # Or "last", "fill" or "rule": the planner did not answer in time, or was wrong.
    source: str = "planner"
    placement: dict[str, list[int]] = {}  # task: devices, as numbers in the view


# --- record files ----------------------------------------------------------------------------------


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write a record file. It is whole or not there."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        for record in records:
            file.write(msgspec.json.encode(record) + b"\n")
    temporary.replace(path)


def other_name(names: dict[str, str], name: str, kind: str) -> str:
    """Return what stands for a name of this kind; `names` keeps the replacements."""
    if not name:
        return ""
    count = sum(key.startswith(f"{kind}:") for key in names)
    return names.setdefault(f"{kind}:{name}", f"{kind}-{count + 1}")


def redacted(record: Record, names: dict[str, str]) -> Record:
    """Return a record without names of tasks and owners. `names` keeps the replacements."""

    def other(name: str, kind: str) -> str:
        return other_name(names, name, kind)

    replace = msgspec.structs.replace
    view = record.question.view
    tasks = [
        TaskFields(
            s.id,
            Task(
                other(s.task.name, "task"), s.task.type, s.task.steps, s.task.arrival_s,
                s.task.devices, s.task.weight, s.task.deadline_s, s.task.kinds,
                other(s.task.owner, "owner"),
            ),
            s.row, s.steps_left, s.kind, s.started, s.restart_cost_s,
        )
        for s in view.tasks
    ]  # fmt: skip
    quotas = {other(owner, "owner"): most for owner, most in view.quotas.items()}
    question = replace(record.question, view=replace(view, tasks=tasks, quotas=quotas))
    return replace(record, question=question)


def as_json(value: object) -> Any:
    """Return a value as its JSON would be read again: what a policy remembers has to survive it."""
    return json.loads(msgspec.json.encode(value))
