"""Finish-time fairness: minimizes the worst ratio of finish time to that of a fair share."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shoal.schedule.allocator.policy import View
from shoal.schedule.allocator.share_program import ShareProgram, alone_speeds, equal_share_speeds
from shoal.schedule.allocator.time_shares import SharePolicy, Shares

#: The ratio is found to this relative precision.
RATIO_PRECISION = 0.005


class FinishTime(SharePolicy):
    """Finds the least feasible ratio by bisection: a ratio requires a speed of each task."""

    name: ClassVar[str] = "finish-time"
    summary: ClassVar[str] = "heterogeneity-aware finish-time fairness"

    def __init__(self) -> None:
        super().__init__()
        self._fair_spent_s: dict[int, float] = {}  # Time a fair share would have taken so far.
        self._before: dict[int, tuple[float, float]] = {}  # steps_left, fair speed at last shares.

    def shares(self, view: View) -> Shares:
        fair = equal_share_speeds(view)
        left = np.array([state.steps_left for state in view.tasks])
        since_s = np.array([view.now_s - state.task.arrival_s for state in view.tasks])
        for state in view.tasks:
            steps, speed = self._before.get(state.id, (state.steps_left, 1.0))
            spent_s = self._fair_spent_s.get(state.id, 0.0)
            self._fair_spent_s[state.id] = spent_s + (steps - state.steps_left) / speed
        self._before = {
            state.id: (state.steps_left, float(speed))
            for state, speed in zip(view.tasks, fair, strict=True)
        }
        fair_s = np.array([self._fair_spent_s[state.id] for state in view.tasks]) + left / fair
        program = ShareProgram(view, alone_speeds(view))
        low = float((since_s / fair_s).max())
        high = max(1.0, 2 * low)
        best = None
        while best is None or high > low * (1 + RATIO_PRECISION) + 1e-6:
            ratio = (low + high) / 2 if best is not None else high
            needs = left / np.maximum(ratio * fair_s - since_s, 1e-9)
            solution, least = program.max_min(needs)
            if least >= 1.0:
                best, high = solution, ratio
            elif best is None:
                low, high = high, 2 * high
            else:
                low = ratio
        return program.shares(best.values)
