"""Checks a plan before it is carried out, and makes a simple one where there is none.

The same rules as the simulator's checker, on the written form and without numpy: the head runs them,
and believes no planner.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.schedule.formats.records import PlanFields, TableFields, TaskFields, ViewFields


def problem(view: ViewFields, plan: PlanFields) -> str | None:
    """Return which rule a plan breaks; None if it can be carried out."""
    states = {state.id: state for state in view.tasks}
    room = Room(view)
    seen: set[int] = set()
    for kind, tasks in plan.assignments:
        if not 0 <= kind < len(view.kinds):
            return f"kind {kind} does not exist"
        if not tasks:
            return "an assignment without tasks"
        for task in tasks:
            if task not in states:
                return f"task {task} does not exist"
            if task in seen:
                return f"task {task} runs twice"
            seen.add(task)
        broken = room.take([states[task] for task in tasks], kind)
        if broken is not None:
            return broken
    return None


class Room:
    """What is still free while assignments are put together: devices of each kind, and quotas."""

    def __init__(self, view: ViewFields) -> None:
        self._view = view
        self._free = [kind.count for kind in view.kinds]
        self._quotas = dict(view.quotas)

    def take(self, members: Sequence[TaskFields], kind: int) -> str | None:
        """Assign tasks to one set of devices. Return why not; then nothing has changed."""
        view, place = self._view, self._view.kinds[kind]
        devices = members[0].task.devices
        if any(state.task.devices != devices for state in members):
            return "gangs of unequal size share devices"
        for state in members:
            if not may_run(view, state, kind):
                return f"task {state.id} cannot run on {place.name}"
        rows = sorted(state.row for state in members)
        if len(members) > 1 and not together(view.table, kind, rows):
            return f"tasks {[s.id for s in members]} cannot run together on {place.name}"
        if not fits(view.table, kind, rows, place.memory_bytes):
            return f"tasks {[s.id for s in members]} are over the memory of {place.name}"
        if devices > self._free[kind]:
            return f"more than the {place.count} devices of {place.name}"
        wanted: dict[str, int] = {}
        for state in members:
            wanted[state.task.owner] = wanted.get(state.task.owner, 0) + devices
        for owner, more in wanted.items():
            if more > self._quotas.get(owner, more):
                return f"over the quota of {owner}"
        self._free[kind] -= devices
        for owner, more in wanted.items():
            if owner in self._quotas:
                self._quotas[owner] -= more
        return None


def may_run(view: ViewFields, state: TaskFields, kind: int) -> bool:
    """Return whether a task can run on a kind at all: declared, with a speed, and fitting."""
    place = view.kinds[kind]
    return (
        (state.task.kinds is None or place.name in state.task.kinds)
        and state.task.devices <= place.count
        and view.table.alone[state.row][kind] > 0
        and fits(view.table, kind, [state.row], place.memory_bytes)
    )


def fits(table: TableFields, kind: int, rows: Sequence[int], memory_bytes: int) -> bool:
    """Return whether the known memories fit a device; unknown ones only alone, if so told."""
    sizes = [table.memory_bytes[row][kind] for row in rows]
    if len(rows) > 1 and not table.unknown_shares and (memory_bytes == 0 or min(sizes) <= 0):
        return False
    return memory_bytes == 0 or sum(sizes) <= memory_bytes


def together(table: TableFields, kind: int, rows: Sequence[int]) -> bool:
    """Return whether a speed is known for these rows on one device: measured, or predicted."""
    measured = {(k, tuple(group)): rates for k, group, rates in table.measured}
    known = measured.get((kind, tuple(rows)))
    if known is not None:
        return min(known) > 0
    if len(rows) > 2 and (kind, tuple(rows[:2])) in measured:
        pairs = [
            measured.get((kind, (rows[a], rows[b])))
            for a in range(len(rows))
            for b in range(a + 1, len(rows))
        ]
        return all(pair is not None and min(pair) > 0 for pair in pairs)
    busy = [value for row in rows for value in table.busy[row][kind]]
    return None not in busy and min(table.alone[row][kind] for row in rows) > 0


def fill(view: ViewFields, keep: PlanFields | None = None) -> PlanFields:
    """Return a plan without a planner: what is kept of an earlier plan, then tasks by arrival.

    Running tasks stay where they are; each other one takes the fastest kind with room for it.
    """
    room = Room(view)
    states = {state.id: state for state in view.tasks}
    assignments: list[tuple[int, list[int]]] = []
    done: set[int] = set()
    for kind, tasks in keep.assignments if keep is not None else ():
        members = [states[t] for t in dict.fromkeys(tasks) if t in states and t not in done]
        if members and 0 <= kind < len(view.kinds) and room.take(members, kind) is None:
            assignments.append((kind, [m.id for m in members]))
            done.update(m.id for m in members)
    by_arrival = sorted(view.tasks, key=lambda s: (s.kind is None, s.task.arrival_s, s.id))
    for state in by_arrival:
        speeds = view.table.alone[state.row]
        kinds = sorted(range(len(view.kinds)), key=lambda k: (k != state.kind, -speeds[k]))
        if state.id in done:
            continue
        for kind in kinds:
            if room.take([state], kind) is None:
                assignments.append((kind, [state.id]))
                break
    return PlanFields(assignments)
