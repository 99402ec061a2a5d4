"""Figures of a run, as they are printed and as they are written to JSON."""

from __future__ import annotations

import msgspec
import numpy as np

from shoal.schedule.simulate.bounds import Bounds
from shoal.schedule.simulate.simulator import Result


class Figures(msgspec.Struct, frozen=True):
    """Seconds, unless the name says otherwise. Field names are what `--json` prints."""

    policy: str
    tasks: int
    devices: int
    round_s: float
    restart_cost_s: float
    average_completion_s: float
    median_completion_s: float
    p99_completion_s: float
    makespan_s: float
    utilisation: float
    worst_finish_ratio: float
    restarts: int
    rounds: int
    deadlines_missed: int
    solve_mean_s: float
    solve_median_s: float
    solve_max_s: float
    decision_gap_mean: float | None
    bounds: dict[str, float] | None
    gaps: dict[str, float] | None


def figures(
    result: Result, policy: str, round_s: float, restart_cost_s: float, bounds: Bounds | None
) -> Figures:
    """Sum a run up. Gaps are relative: 0.05 is 5 % above the bound."""
    completions = result.completions_s
    average_s, makespan_s = float(completions.mean()), result.makespan_s
    solves = np.array([r.solve_s for r in result.rounds])
    decision_gaps = [r.gap for r in result.rounds if r.gap is not None and np.isfinite(r.gap)]
    missed = sum(
        1
        for task, completion in zip(result.tasks, completions, strict=True)
        if task.deadline_s is not None and completion > task.deadline_s
    )
    known = gaps = None
    if bounds is not None:
        known = {
            "average_completion_s": bounds.average_completion_s,
            "makespan_s": bounds.makespan_s,
        }
        gaps = {
            "average_completion": average_s / bounds.average_completion_s - 1,
            "makespan": makespan_s / bounds.makespan_s - 1,
        }
    return Figures(
        policy=policy,
        tasks=len(result.tasks),
        devices=result.pool.devices,
        round_s=round_s,
        restart_cost_s=restart_cost_s,
        average_completion_s=average_s,
        median_completion_s=float(np.median(completions)),
        p99_completion_s=float(np.percentile(completions, 99)),
        makespan_s=makespan_s,
        utilisation=result.utilisation,
        worst_finish_ratio=float(result.finish_ratios.max()),
        restarts=result.restarts,
        rounds=len(result.rounds),
        deadlines_missed=missed,
        solve_mean_s=float(solves.mean()),
        solve_median_s=float(np.median(solves)),
        solve_max_s=float(solves.max()),
        decision_gap_mean=float(np.mean(decision_gaps)) if decision_gaps else None,
        bounds=known,
        gaps=gaps,
    )
