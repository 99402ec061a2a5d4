"""The unfinished tasks in memory, and which of them wait, run or changed. Pure."""

from __future__ import annotations

from shoal.pool.head.tasks.rows import Entry
from shoal.tasks.states import ACTIVE, State


class TaskIndex:
    def __init__(self) -> None:
        self.tasks: dict[int, Entry] = {}  # unfinished, and those whose end is not on the disk yet
        self.keys: dict[tuple[str, str], int] = {}  # owner and key -> task
        self.waiting: set[int] = set()  # numbers of those in state waiting or held
        self.with_until: set[int] = set()  # of those that wait
        self.active: set[int] = set()
        self.touched: set[int] = set()  # numbers of those that changed since admission looked
        self.followers: dict[int, set[int]] = {}  # task -> those that wait for its end

    def add(self, entry: Entry) -> None:
        number = entry.number
        self.tasks[number] = entry
        self.keys[entry.owner, entry.key] = number
        for earlier in entry.task.after:
            self.followers.setdefault(earlier, set()).add(number)
        self.sort(entry)

    def sort(self, entry: Entry) -> None:
        """Put a task into the groups of its state."""
        state = entry.task.state
        self.touched.add(entry.number)
        waits = state in (State.WAITING, State.HELD)
        for group, belongs in (
            (self.waiting, waits),
            (self.active, state in ACTIVE),
            (self.with_until, waits and entry.task.until_at is not None),
        ):
            if belongs:
                group.add(entry.number)
            else:
                group.discard(entry.number)

    def remove(self, entry: Entry) -> None:
        number = entry.number
        self.touched.add(number)
        self.tasks.pop(number, None)
        self.keys.pop((entry.owner, entry.key), None)
        for group in (self.waiting, self.active, self.with_until):
            group.discard(number)
        for earlier in entry.task.after:
            self.followers.get(earlier, set()).discard(number)

    def take_touched(self) -> set[int]:
        """Return the numbers of the tasks that have changed since the last call."""
        taken, self.touched = self.touched, set()
        return taken
