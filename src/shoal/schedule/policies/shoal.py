"""Shoal's own policy: each round runs what saves the most waiting.

The objective is mean completion time plus `balance` times the time of the last finish, with a
guard for tasks that fall behind their fair share. What is it worth to finish a task?

- Its own time: while it runs at full speed its finish comes a second nearer per second.
- The others' time: its work occupies the pool for y seconds (`prices`), and every task that is
  served after it is later by y. Tasks are served in order of y, as in shortest-first.
- The end: the pool's last finish is later by its price in the critical program. While there are
  few tasks, the finish itself is in the round's program instead of its price.

A round takes what promises most of this worth per round (`round_program`). Worth is a gradient:
the same figures, with other words, are what `explain` shows.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from shoal.schedule.allocator.fairshare import FairClock
from shoal.schedule.allocator.policy import Assignment, Plan, Policy, View
from shoal.schedule.allocator.prices import Groups, class_speeds, find_groups, price
from shoal.schedule.allocator.round_program import Chosen, RoundProgram, Worth
from shoal.schedule.allocator.task_classes import Classes, classify
from shoal.schedule.model.throughputs import Floats

#: Weight of the last finish against mean completion time. 0: completion time alone.
BALANCE = 0.3
#: A task that heads beyond this part of its fair finish time, or of its deadline, is pulled forward…
FAIR_GUARD, DEADLINE_GUARD = 0.9, 0.75
#: … by this factor per unit beyond, and more the longer it lasts. With balance 0 nobody is.
FAIR_SLOPE, DEADLINE_SLOPE = 20.0, 200.0


class Shoal(Policy):
    """`balance` is the one knob: 0 is completion time, larger is makespan and fairness."""

    name: ClassVar[str] = "shoal"
    summary: ClassVar[str] = "completion time, makespan and fairness by one knob; k-way sharing"

    def __init__(self, balance: float = BALANCE) -> None:
        self.balance = balance
        self._clock = FairClock()
        self._busy_since: int | None = None  # First task of the current busy time.

    def state(self) -> dict[str, Any]:
        return {"clock": self._clock.state(), "busy_since": self._busy_since}

    def restore(self, state: dict[str, Any], view: View) -> None:
        if state:
            self._clock.restore(state["clock"], view)
            self._busy_since = state["busy_since"]

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
        if self.balance == 0:
            return np.ones(len(view.tasks))
        end_s = ages_s + least_s
        unfair = np.maximum(0.0, end_s / fair_s - FAIR_GUARD)
        overdue = np.maximum(0.0, end_s / allowed_s - DEADLINE_GUARD)
        # The square outgrows whatever a steady stream of short tasks is worth.
        late = FAIR_SLOPE * unfair + DEADLINE_SLOPE * overdue
        urgency: Floats = 1.0 + late + late**2
        return urgency

    def _worth(self, view: View, classes: Classes, groups: Groups) -> Worth:
        least_s = classes.steps / class_speeds(view, classes).max(axis=1)
        # A task that needs less than a round takes its devices for all of it.
        whole = np.maximum(1.0, view.round_s / least_s)
        load_s = price(view, classes, groups, critical=False).task_s * whole
        order = np.argsort(load_s / classes.weight, kind="stable")
        weight = (classes.weight * classes.count)[order]
        behind = np.empty(len(classes))
        # Half of a class is served after the mean of its members.
        behind[order] = weight.sum() - np.cumsum(weight) + (weight - classes.weight[order]) / 2
        early = (classes.weight * least_s * whole + load_s * behind) * classes.urgency
        if self.balance == 0:
            return Worth(early, np.zeros(len(classes)), 0.0, 0.0)
        last = price(view, classes, groups, critical=True)
        end_s = last.task_s * whole * classes.urgency
        return Worth(early, end_s, self.balance * self._served(view), last.least_s)

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
