"""A defect of Gavel's code, rebuilt, to show where its published figures come from."""

from __future__ import annotations

import random

import numpy as np

from shoal.schedule.allocator.policy import View
from shoal.schedule.allocator.time_shares import SharePolicy, Shares


class GavelFifo(SharePolicy):
    """Gavel's plain FIFO with its defect, to show where its figures come from.

    Its code draws one of the kinds that have room, but then books the last kind of its list, full
    or not, and when that one is used up exactly it strikes the drawn kind off the list. So the
    queue piles up on the fastest kind while the others stay empty: a utilisation of 8/48.
    """

    work_conserving = False

    def __init__(self) -> None:
        super().__init__()
        self._kind_of: dict[int, int] = {}
        self._draw = random.Random(0)

    def shares(self, view: View) -> Shares:
        free = [kind.count for kind in view.pool.kinds]
        gangs = {state.id: state.task.devices for state in view.tasks}
        waiting = [state for state in view.tasks if state.id not in self._kind_of]
        for task, kind in sorted(self._kind_of.items()):
            if task in gangs:
                free[kind] -= gangs[task]
                continue
            del self._kind_of[task]  # It is done; the head of the queue takes its kind, if it fits.
            head = waiting.pop(0) if waiting else None
            if head is not None and head.task.devices <= free[kind] and view.may_run(head, kind):
                self._kind_of[head.id] = kind
                free[kind] -= head.task.devices
        listed = [kind for kind in reversed(range(len(free))) if free[kind] > 0]
        for state in waiting:
            fits = [kind for kind in listed if free[kind] >= state.task.devices]
            if not fits:
                break
            kind = listed[-1] if view.may_run(state, listed[-1]) else 1
            drawn = self._draw.choice(fits)
            self._kind_of[state.id] = kind
            free[kind] -= state.task.devices
            if free[kind] == 0:
                listed.remove(drawn)
        unit = np.eye(len(free))
        return {(task,): unit[kind] for task, kind in self._kind_of.items()}
