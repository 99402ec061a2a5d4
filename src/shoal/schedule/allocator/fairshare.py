"""The fair reference: when would each task finish if all present tasks shared the pool equally?

A fluid model that no scheduler can run exactly: at each moment each of the n present tasks has one
n-th of the devices of each kind. It depends on the trace alone, not on the schedule that is
judged, so ratios of different policies can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.schedule.allocator.policy import TaskState, View
from shoal.schedule.model.entities import Pool, Task
from shoal.schedule.model.throughputs import Floats, Throughputs


class EqualShares:
    """Speeds of tasks that share a pool equally; constants are computed once."""

    def __init__(
        self, pool: Pool, table: Throughputs, rows: Sequence[int], tasks: Sequence[Task]
    ) -> None:
        known: dict[tuple[int, frozenset[str] | None], list[float]] = {}
        speeds = []
        for row, task in zip(rows, tasks, strict=True):
            key = (row, task.kinds)
            if key not in known:
                known[key] = [
                    0.0
                    if task.devices > kind.count or (task.kinds and kind.name not in task.kinds)
                    else float(table.alone[row, number])
                    for number, kind in enumerate(pool.kinds)
                ]
            speeds.append(known[key])
        self._speeds = np.array(speeds).reshape(len(speeds), len(pool.kinds))
        counts = np.array([kind.count for kind in pool.kinds], dtype=np.float64)
        gangs = np.array([task.devices for task in tasks], dtype=np.float64)
        #: Fraction of time on each kind for a task that has the pool to itself.
        self._time = np.where(self._speeds > 0, counts / gangs[:, None], 0.0)
        self._total = self._time.sum(axis=1)
        self._rates = (self._speeds * self._time).sum(axis=1)

    def rates(self, chosen: npt.NDArray[np.int64], present: int) -> Floats:
        """steps/s of the chosen tasks when each holds one `present`-th of the device time.

        A task cannot use more than all of the time, whatever its share.
        """
        rates: Floats = self._rates[chosen] / np.maximum(present, self._total[chosen])
        return rates


def fair_finishes(
    pool: Pool, table: Throughputs, rows: Sequence[int], tasks: Sequence[Task]
) -> Floats:
    """Return the finish time of each task under equal sharing, for tasks sorted by arrival."""
    arrivals = np.array([task.arrival_s for task in tasks])
    left = np.array([task.steps for task in tasks], dtype=np.float64)
    finishes = np.full(len(tasks), np.inf)
    shares = EqualShares(pool, table, rows, tasks)
    active = np.zeros(0, dtype=np.int64)
    now_s, arrived = 0.0, 0
    while arrived < len(tasks) or len(active):
        next_s = arrivals[arrived] if arrived < len(tasks) else np.inf
        if len(active):
            rates = shares.rates(active, len(active))
            needs_s = left[active] / np.maximum(rates, 1e-300)
            step_s = min(float(needs_s.min()), next_s - now_s)
            left[active] -= rates * step_s
            now_s += step_s
            done = needs_s <= step_s * (1 + 1e-12)
            finishes[active[done]] = now_s
            active = active[~done]
        else:
            now_s = float(next_s)
        while arrived < len(tasks) and arrivals[arrived] <= now_s:
            active = np.append(active, arrived)
            arrived += 1
    return finishes


class FairClock:
    """Equal sharing up to now, computed step by step without the future.

    `advance` moves it to the view's time. A task that is finished for real goes on sharing here
    until equal sharing would have finished it: otherwise a fast schedule would look unfair.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._sharing: dict[int, TaskState] = {}  # Unfinished under equal sharing.
        self._left = np.zeros(0)  # Steps left of each, and its speed since the last call.
        self._rates = np.zeros(0)
        self._fair_s: dict[int, float] = {}  # Time from arrival to fair finish.

    def state(self) -> dict[str, Any]:
        """Return what it knows, as JSON has it."""
        return {
            "now_s": self._now_s,
            "sharing": [
                [s.id, s.task.type, s.task.devices, s.task.steps, s.task.arrival_s,
                 None if s.task.kinds is None else sorted(s.task.kinds), left, rate]
                for s, left, rate in zip(
                    self._sharing.values(), self._left.tolist(), self._rates.tolist(), strict=True
                )
            ],
            "fair_s": sorted(self._fair_s.items()),
        }  # fmt: skip

    def restore(self, state: dict[str, Any], view: View) -> None:
        """Go on from what an earlier clock knew. Types that the view's table lacks are forgotten."""
        self._sharing, left, rates = {}, [], []
        for number, type_, devices, steps, arrival_s, kinds, rest, rate in state["sharing"]:
            row = view.table.row_of.get((type_, devices))
            if row is None:
                continue
            task = Task(
                "", type_, steps, arrival_s, devices,
                kinds=None if kinds is None else frozenset(kinds),
            )  # fmt: skip
            self._sharing[number] = TaskState(number, task, row, rest)
            left.append(rest)
            rates.append(rate)
        self._left, self._rates = np.array(left), np.array(rates)
        self._fair_s = dict(state["fair_s"])
        self._now_s = state["now_s"]

    def advance(self, view: View) -> None:
        """Give each task its equal share of the time since the last call."""
        self._left = np.maximum(0.0, self._left - self._rates * (view.now_s - self._now_s))
        states = list(self._sharing.values())
        for state, left in zip(states, self._left.tolist(), strict=True):
            if left <= 0:
                self._fair_s[state.id] = max(view.now_s - state.task.arrival_s, 1e-9)
        going = self._left > 0
        kept = [state for state, on in zip(states, going.tolist(), strict=True) if on]
        known = self._sharing.keys() | self._fair_s.keys()
        new = [state for state in view.tasks if state.id not in known]
        self._sharing = {state.id: state for state in [*kept, *new]}
        self._left = np.append(self._left[going], [state.task.steps for state in new])
        present = {state.id for state in view.tasks}
        self._fair_s = {task: s for task, s in self._fair_s.items() if task in present}
        rows = [state.row for state in self._sharing.values()]
        tasks = [state.task for state in self._sharing.values()]
        shares = EqualShares(view.pool, view.table, rows, tasks)
        self._rates = shares.rates(np.arange(len(tasks)), len(tasks))
        self._now_s = view.now_s

    def fair_times(self, view: View) -> Floats:
        """Return the seconds from arrival to the fair finish, without further arrivals."""
        rest_s = dict(zip(self._sharing, self._left / np.maximum(self._rates, 1e-300), strict=True))
        times = [
            view.now_s - state.task.arrival_s + rest_s[state.id]
            if state.id in rest_s
            else self._fair_s[state.id]
            for state in view.tasks
        ]
        return np.array(times)
