"""Least makespan: finishes all present tasks as early as possible, in any order."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shoal.schedule.allocator.policy import View
from shoal.schedule.allocator.share_program import ShareProgram, alone_speeds
from shoal.schedule.allocator.solver import INFINITY
from shoal.schedule.allocator.time_shares import SharePolicy, Shares


class Makespan(SharePolicy):
    """With times instead of shares (y = x·T) this is one linear program, not a search over T."""

    name: ClassVar[str] = "makespan"
    summary: ClassVar[str] = "all present tasks finish together, as early as possible"
    packed: ClassVar[bool] = False

    def shares(self, view: View) -> Shares:
        shares = ShareProgram(
            view, alone_speeds(view), packed=self.packed and view.together_max > 1
        )
        program = shares.program(times=True)
        left = np.array([state.steps_left for state in view.tasks])
        rows = program.rows(left, np.full(len(left), INFINITY))
        program.add(rows[shares.member_task], shares.member_column, shares.member_rate)
        solution = program.solve(method="interior")
        assert solution is not None, "with time enough, all work is feasible"
        return shares.shares(solution.values / max(solution.objective, 1e-9))


class MakespanPacked(Makespan):
    """The same with pairs of tasks on one device."""

    name: ClassVar[str] = "makespan-packed"
    summary: ClassVar[str] = "makespan with pairs on one device"
    packed: ClassVar[bool] = True
