"""Shoal's own policy: each round runs what saves the most waiting.

The objective is mean completion time plus `balance` times the time of the last finish, with a
guard for tasks that fall behind their fair share. What is it worth to finish a task?

- Its own time: while it runs at full speed its finish comes a second nearer per second.
- The others' time: its work occupies the pool for y seconds (`prices`), and every task that is
  served after it is later by y. Tasks are served in order of y, as in shortest-first.
- The end: the pool's last finish is later by its price in the critical program.

A round takes what promises most of this worth per round (`round_program`). Worth is a gradient:
the same figures, with other words, are what `explain` shows.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shoal.schedule.classes import Classes, classify
from shoal.schedule.fairshare import FairClock
from shoal.schedule.policy import Assignment, Plan, Policy, View
from shoal.schedule.prices import Groups, find_groups, price
from shoal.schedule.round_program import Chosen, RoundProgram
from shoal.schedule.throughputs import Floats

#: Weight of the last finish against mean completion time. 0: completion time alone.
BALANCE = 0.3
#: A task whose finish-time ratio is heading beyond this is pulled forward…
RATIO_GUARD = 0.9
#: … by this factor per unit of the ratio. With balance 0 nobody is.
GUARD_SLOPE = 20.0


class Shoal(Policy):
    """`balance` is the one knob: 0 is completion time, larger is makespan and fairness."""

    name: ClassVar[str] = "shoal"
    summary: ClassVar[str] = "completion time, makespan and fairness by one knob; k-way sharing"

    def __init__(self, balance: float = BALANCE) -> None:
        self.balance = balance
        self._clock = FairClock()
        self._busy_since: int | None = None  # First task of the current busy time.

    def decide(self, view: View) -> Plan:
        view = view.runnable()
        if not view.tasks:
            return Plan(())
        classes = classify(view, self._urgency(view))
        groups = find_groups(view, classes.rows)
        worth = self._worth(view, classes, groups)
        program = RoundProgram(view, classes, groups, worth)
        chosen = program.solve()
        prices = {
            f"price:{kind.name}": float(value)
            for kind, value in zip(view.pool.kinds, chosen.device_prices, strict=True)
        }
        return Plan(_assign(view, classes, chosen), chosen.value, chosen.bound, prices)

    def _urgency(self, view: View) -> Floats:
        """1 for a task in good time; more when it heads beyond its fair finish or deadline."""
        self._clock.advance(view)
        fair_s = self._clock.fair_times(view)
        ages_s = np.array([view.now_s - state.task.arrival_s for state in view.tasks])
        least_s = np.array([s.steps_left / view.table.best[s.row] for s in view.tasks])
        allowed_s = np.array([s.task.deadline_s or np.inf for s in view.tasks])
        ratio = (ages_s + least_s) / np.minimum(fair_s, allowed_s)
        slope = GUARD_SLOPE if self.balance > 0 else 0.0
        urgency: Floats = 1.0 + slope * np.maximum(0.0, ratio - RATIO_GUARD)
        return urgency

    def _worth(self, view: View, classes: Classes, groups: Groups) -> Floats:
        """Value of finishing one task of each class, in seconds of waiting saved."""
        speeds = np.where(classes.allowed, view.table.alone[classes.rows], 0.0)
        least_s = classes.steps / speeds.max(axis=1)
        # A task that needs less than a round takes its devices for all of it.
        whole = np.maximum(1.0, view.round_s / least_s)
        load_s = price(view, classes, groups, critical=False).task_s * whole
        order = np.argsort(load_s / classes.weight, kind="stable")
        weight = (classes.weight * classes.count)[order]
        behind = np.empty(len(classes))
        # Half of a class is served after the mean of its members.
        behind[order] = weight.sum() - np.cumsum(weight) + (weight - classes.weight[order]) / 2
        worth = classes.weight * least_s * whole + load_s * behind
        if self.balance > 0:
            last = price(view, classes, groups, critical=True)
            worth += self.balance * self._served(view) * last.task_s * whole
        result: Floats = worth * classes.urgency
        return result

    def _served(self, view: View) -> float:
        """Tasks of the current busy time: what one second of the mean is worth in their sum."""
        first, last = view.tasks[0].id, view.tasks[-1].id
        new = self._busy_since is None or all(not state.started for state in view.tasks)
        self._busy_since = first if new else self._busy_since
        return float(last - (self._busy_since or 0) + 1)


def _assign(view: View, classes: Classes, chosen: Chosen) -> tuple[Assignment, ...]:
    """Classes to tasks: within a class, the task with least left goes first."""
    queues = [iter(members) for members in classes.members]
    assignments = []
    for kind, members, times in chosen.columns:
        for _ in range(times):
            ids = (view.tasks[next(queues[number])].id for number in members)
            assignments.append(Assignment(kind, tuple(sorted(ids))))
    return tuple(assignments)
