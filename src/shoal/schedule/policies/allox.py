"""AlloX-like: shortest average completion time by matching tasks to positions in the queues."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shoal.schedule.allocator.policy import Plan, Policy, Room, TaskState, View
from shoal.schedule.allocator.solver import Program

#: Tasks looked at in one matching, oldest first: longer queues are matched as places free up.
TASKS_MAX = 400


class Allox(Policy):
    """A task that is k-th from the end of a queue delays k tasks, itself included, by its duration.

    So the cost of (task, kind, k) is k times the duration, and the cheapest matching of tasks to
    (kind, k) is the best order. Running tasks are never interrupted. A gang fills as many places
    as it has devices.
    """

    name: ClassVar[str] = "allox"
    summary: ClassVar[str] = "matching of tasks to queue places, nobody is interrupted"

    def decide(self, view: View) -> Plan:
        view = view.runnable()
        room = Room(view)
        for state in view.tasks:
            if state.kind is not None:
                room.take([state], state.kind)
        waiting = [state for state in view.tasks if state.kind is None][:TASKS_MAX]
        for state, kind in self._match(view, waiting) if waiting and any(room.free) else ():
            room.take([state], kind)
        return Plan(tuple(room.assignments))

    def _match(self, view: View, waiting: list[TaskState]) -> list[tuple[TaskState, int]]:
        """Return the tasks with their kinds, in the order of the queue."""
        counts = np.array([kind.count for kind in view.pool.kinds], dtype=np.float64)
        gangs = np.array([state.task.devices for state in waiting], dtype=np.float64)
        depth = int(np.ceil(2 * gangs.sum() / counts.sum())) + 1
        choices = [
            (number, kind, place)
            for number, state in enumerate(waiting)
            for kind in range(len(counts))
            if view.may_run(state, kind)
            for place in range(1, depth + 1)
        ]
        task, kinds, place = (np.array(column) for column in zip(*choices, strict=True))
        rows = np.array([state.row for state in waiting])
        left = np.array([state.steps_left for state in waiting])
        program = Program()
        columns = program.columns(place * left[task] / view.table.alone[rows[task], kinds])
        program.add(program.equal(np.ones(len(waiting)))[task], columns, np.ones(len(task)))
        capacity = program.at_most(np.repeat(counts, depth))
        program.add(capacity[kinds * depth + place - 1], columns, gangs[task])
        solution = program.solve()
        if solution is None:
            return []
        # A gang may be split over places by the relaxation: its largest part decides.
        chosen = [
            max(np.flatnonzero(task == number), key=lambda column: solution.values[column])
            for number in range(len(waiting))
        ]
        chosen.sort(key=lambda column: (-place[column], waiting[task[column]].id))
        return [(waiting[task[column]], int(kinds[column])) for column in chosen]
