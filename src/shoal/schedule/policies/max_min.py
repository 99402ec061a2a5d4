"""Max-min fairness: maximizes the smallest share of the pool."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shoal.schedule.allocator.policy import View
from shoal.schedule.allocator.share_program import ShareProgram, alone_speeds, average_speeds
from shoal.schedule.allocator.time_shares import SharePolicy, Shares
from shoal.schedule.model.throughputs import Floats


def _weights(view: View) -> Floats:
    return np.array([state.task.weight / state.task.devices for state in view.tasks])


class Las(SharePolicy):
    """Least attained service: equal device time for all, blind to speed."""

    name: ClassVar[str] = "las"
    summary: ClassVar[str] = "equal device time, blind to speed"
    in_order: ClassVar[bool] = False

    def shares(self, view: View) -> Shares:
        ones = np.ones((len(view.tasks), len(view.pool.kinds)))
        program = ShareProgram(view, ones)
        solution, _ = program.max_min(_weights(view))
        return program.shares(solution.values)


class MaxMin(SharePolicy):
    """Heterogeneity-aware: maximizes the least progress relative to a task's average speed."""

    name: ClassVar[str] = "max-min"
    summary: ClassVar[str] = "heterogeneity-aware max-min fairness"

    def shares(self, view: View) -> Shares:
        program = ShareProgram(view, alone_speeds(view))
        solution, _ = program.max_min(average_speeds(view) * _weights(view))
        return program.shares(solution.values)


class MaxMinPacked(SharePolicy):
    """The same with pairs of tasks on one device."""

    name: ClassVar[str] = "max-min-packed"
    summary: ClassVar[str] = "max-min fairness with pairs on one device"

    def shares(self, view: View) -> Shares:
        program = ShareProgram(view, alone_speeds(view), packed=view.together_max > 1)
        solution, _ = program.max_min(alone_speeds(view).sum(axis=1) * _weights(view))
        return program.shares(solution.values)
