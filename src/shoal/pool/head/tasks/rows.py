"""The tasks in the head's database: one row each, and its specification in another table.

The head reads specifications only to start a program, so a waiting task costs it little memory.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from shoal.pool.base import limits
from shoal.pool.head.store import Pending, Store
from shoal.tasks import states
from shoal.tasks.spec import Needs, TaskSpec


@dataclass(slots=True)
class Submitted:
    """What stays as it was submitted, and how far the task is."""

    task: states.Task
    key: str
    owner: str
    id: str
    name: str
    needs: Needs
    request: bytes


@dataclass(slots=True)
class Entry(Submitted):
    """A task as the head keeps it in memory: what decides, and what people see."""

    priority: str = "normal"
    grace_s: float = 10.0
    limit_s: float | None = None
    machine: str = ""  # where its folder is; "": its files are here
    folder: str = ""
    keep: tuple[str, ...] = ()
    travels: bool = False  # its files are at the head, for runners of others
    ticket: str = ""  # a hash of what the current attempt's program shows
    shares: dict[int, int] = field(default_factory=dict)  # device -> bytes, of the current attempt
    lease: int | None = None  # that its program has
    last_runner: str = ""  # which has the log and files of the last attempt
    steps: int | None = None  # that its program will make, as its owner says
    deadline_at: float | None = None
    yields: bool = False
    on_disk: bool = True  # False: it is being submitted

    @property
    def number(self) -> int:
        return self.task.number


class _Row(msgspec.Struct, array_like=True):
    """What a row holds of an entry besides its columns."""

    task: dict[str, object]
    id: str
    needs: Needs
    priority: str
    grace_s: float
    limit_s: float | None
    machine: str
    folder: str
    keep: tuple[str, ...]
    ticket: str
    shares: dict[int, int]
    lease: int | None
    last_runner: str
    steps: int | None = None
    deadline_at: float | None = None
    travels: bool = False
    yields: bool = False


def _encode(entry: Entry) -> bytes:
    task = msgspec.to_builtins(entry.task)
    return msgspec.msgpack.encode(
        _Row(
            task,
            entry.id,
            entry.needs,
            entry.priority,
            entry.grace_s,
            entry.limit_s,
            entry.machine,
            entry.folder,
            entry.keep,
            entry.ticket,
            entry.shares,
            entry.lease,
            entry.last_runner,
            entry.steps,
            entry.deadline_at,
            entry.travels,
            entry.yields,
        )
    )


def _decode(owner: str, key: str, request: bytes, name: str, row: bytes) -> Entry:
    found = msgspec.msgpack.decode(row, type=_Row)
    task = msgspec.convert(found.task, states.Task)
    return Entry(
        task, key, owner, found.id, name, found.needs, request, found.priority, found.grace_s,
        found.limit_s, found.machine, found.folder, found.keep, found.travels, found.ticket,
        found.shares, found.lease, found.last_runner, found.steps, found.deadline_at,
        found.yields,
    )  # fmt: skip


_COLUMNS = "owner, key, request, name, row"


class TaskStore:
    """The tasks' tables in the head's store. `on_change` is called when a task's row changes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.on_change: Callable[[], None] = lambda: None

    def add(self, entry: Entry, spec: TaskSpec) -> Pending:
        """Promise a new task."""
        encoded = msgspec.msgpack.encode(spec)
        values = (
            entry.number, entry.owner, entry.key, entry.request, entry.name, entry.task.state.value,
            _encode(entry),
        )  # fmt: skip

        def write(db: sqlite3.Connection) -> None:
            db.execute("INSERT INTO tasks VALUES (?,?,?,?,?,?,0,?,NULL)", values)
            db.execute("INSERT INTO task_specs VALUES (?,?)", (values[0], encoded))
            db.execute("INSERT OR REPLACE INTO counters VALUES ('task', ?)", (values[0],))

        return self._store.change(write, promise=True)

    def change(self, entry: Entry, *, promise: bool) -> Pending:
        """Write a task's new state. A plan is a promise; what has happened is kept until it fits."""
        ended = entry.task.state in states.FINAL
        values = (
            entry.task.state.value, int(ended), _encode(entry), entry.task.ended_at, entry.number
        )  # fmt: skip

        self.on_change()

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                "UPDATE tasks SET state = ?, ended = ?, row = ?, ended_at = ? WHERE number = ?",
                values,
            )

        return self._store.change(write, promise=promise)

    def remove(self, numbers: Iterable[int]) -> None:
        gone = [(number,) for number in numbers]

        def write(db: sqlite3.Connection) -> None:
            db.executemany("DELETE FROM tasks WHERE number = ?", gone)

        self._store.change(write, promise=False)

    # --- reading -----------------------------------------------------------------------------------

    def unfinished(self) -> list[Entry]:
        rows = self._store.read(f"SELECT {_COLUMNS} FROM tasks WHERE ended = 0 ORDER BY number")
        return [_decode(*row) for row in rows]

    def last_number(self) -> int:
        return self._store.counter("task", 0)

    def by_key(self, owner: str, key: str) -> Entry | None:
        return self._one("owner = ? AND key = ?", owner, key)

    def by_number(self, number: int) -> Entry | None:
        return self._one("number = ?", number)

    def _one(self, where: str, *values: object) -> Entry | None:
        rows = self._store.read(f"SELECT {_COLUMNS} FROM tasks WHERE {where}", *values)
        return _decode(*rows[0]) if rows else None

    def newest_named(self, owner: str, name: str) -> int | None:
        """Return the number of an owner's newest task of that name."""
        rows = self._store.read(
            "SELECT MAX(number) FROM tasks WHERE owner = ? AND name = ?", owner, name
        )
        found = rows[0][0]
        return int(found) if found is not None else None

    def page(self, first: int, count: int) -> list[Entry]:
        """Return tasks from this number on, those included that have ended."""
        rows = self._store.read(
            f"SELECT {_COLUMNS} FROM tasks WHERE number >= ? ORDER BY number LIMIT ?", first, count
        )
        return [_decode(*row) for row in rows]

    def spec(self, number: int) -> TaskSpec | None:
        rows = self._store.read("SELECT spec FROM task_specs WHERE number = ?", number)
        return msgspec.msgpack.decode(rows[0][0], type=TaskSpec) if rows else None

    def old(self, now: float) -> list[int]:
        """Return ended tasks that are kept no longer: those too old, and those over the count."""
        too_old = self._store.read(
            "SELECT number FROM tasks WHERE ended = 1 AND ended_at < ? LIMIT 1000",
            now - limits.TASKS_KEPT_DAYS * 86400,
        )
        over = self._store.read(
            "SELECT number FROM tasks WHERE ended = 1 ORDER BY ended_at DESC LIMIT 1000 OFFSET ?",
            limits.TASKS_KEPT_MAX,
        )
        return sorted({int(row[0]) for row in [*too_old, *over]})
