"""Groups equal tasks, so that a decision's size follows the kinds of work, not the queue.

Tasks of one class have the same table row, weight, owner, allowed kinds, place and about the same
number of steps left. While there are few tasks each is a class of its own, and nothing is lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.schedule.allocator.policy import TaskState, View
from shoal.schedule.model.throughputs import Floats

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

#: Classes in one decision. Up to this many tasks are told apart exactly.
CLASSES_MAX = 200
#: Ratios of steps left that still count as alike, finest first.
SIZE_RATIOS = (1.05, 1.25, 2.0, 8.0, math.inf)


@dataclass(frozen=True, slots=True)
class Classes:
    """One entry per class. `members` are positions in `View.tasks`, least work first."""

    rows: Ints
    count: Floats
    steps: Floats  # Steps left, mean of the members.
    longest: Floats  # Steps left of the member with most.
    weight: Floats
    urgency: Floats  # At least 1; grows when a task gets late.
    gangs: Floats
    allowed: Bools  # (classes, kinds)
    at: Ints  # Kind on which the members ran in the last round; -1: they waited.
    started: Bools
    restarts_s: Floats  # Lost by a member that resumes or moves.
    owners: list[str]
    members: list[list[int]]

    def __len__(self) -> int:
        return len(self.rows)


def classify(view: View, urgency: Floats, classes_max: int = CLASSES_MAX) -> Classes:
    """Group the view's tasks, as finely as `classes_max` allows.

    Args:
        urgency: One factor per task of the view.
    """
    masks = allowed_kinds(view)
    exact = len(view.tasks) <= classes_max
    found: dict[tuple[object, ...], list[int]] = {}
    for ratio in (1.0,) if exact else SIZE_RATIOS:
        found = {}
        for position, state in enumerate(view.tasks):
            size = position if exact else _bucket(state.steps_left, ratio)
            late = 0 if exact else _bucket(float(urgency[position]), 2.0)
            key = (*_alike(view, state), size, late)
            found.setdefault(key, []).append(position)
        if len(found) <= classes_max:
            break
    members = [sorted(m, key=lambda p: (view.tasks[p].steps_left, p)) for m in found.values()]
    firsts = [view.tasks[m[0]] for m in members]
    left = [np.array([view.tasks[p].steps_left for p in m]) for m in members]
    return Classes(
        rows=np.array([s.row for s in firsts]),
        count=np.array([float(len(m)) for m in members]),
        steps=np.array([float(x.mean()) for x in left]),
        longest=np.array([float(x.max()) for x in left]),
        weight=np.array([s.task.weight for s in firsts]),
        urgency=np.array([float(np.mean(urgency[m])) for m in members]),
        gangs=np.array([float(s.task.devices) for s in firsts]),
        allowed=masks[[m[0] for m in members]],
        at=np.array([-1 if s.kind is None else s.kind for s in firsts]),
        started=np.array([s.started for s in firsts]),
        restarts_s=np.array([view.restart_s(s) for s in firsts]),
        owners=[s.task.owner for s in firsts],
        members=members,
    )


def _alike(view: View, state: TaskState) -> tuple[object, ...]:
    """Return what has to be equal; a task's device matters only if moving has a cost."""
    task = state.task
    restart_s = view.restart_s(state)
    place = (state.kind, state.started, restart_s) if restart_s > 0 else ()
    return state.row, task.kinds, task.weight, task.owner if view.pool.quotas else "", place


def _bucket(value: float, ratio: float) -> int:
    return 0 if math.isinf(ratio) else int(math.log(max(value, 1e-9)) / math.log(ratio))


def allowed_kinds(view: View) -> Bools:
    """Return whether a task may run on a kind, shape (tasks, kinds). Equal tasks are computed once."""
    known: dict[tuple[int, frozenset[str] | None], list[bool]] = {}
    masks = []
    for state in view.tasks:
        key = (state.row, state.task.kinds)
        if key not in known:
            known[key] = [view.may_run(state, kind) for kind in range(len(view.pool.kinds))]
        masks.append(known[key])
    return np.array(masks, dtype=np.bool_).reshape(len(masks), len(view.pool.kinds))
