"""The fair reference: when would each task finish if all present tasks shared the pool equally?

A fluid model that no scheduler can run exactly: at each moment each of the n present tasks has one
n-th of the devices of each kind. It depends on the trace alone, not on the schedule that is
judged, so ratios of different policies can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.schedule.model import Pool, Task
from shoal.schedule.policy import View
from shoal.schedule.throughputs import Floats, Throughputs


def equal_share_rates(
    pool: Pool, table: Throughputs, rows: Sequence[int], tasks: Sequence[Task], present: int
) -> Floats:
    """steps/s of each task when it holds one `present`-th of the pool's device time.

    A task cannot use more than all of the time, whatever its share.
    """
    counts = np.array([kind.count for kind in pool.kinds], dtype=np.float64)
    gangs = np.array([task.devices for task in tasks], dtype=np.float64)
    speeds = table.alone[list(rows)].copy()
    for index, task in enumerate(tasks):
        for number, kind in enumerate(pool.kinds):
            if task.devices > kind.count or (task.kinds and kind.name not in task.kinds):
                speeds[index, number] = 0.0
    time_shares = np.where(speeds > 0, counts / (present * gangs[:, None]), 0.0)
    total = time_shares.sum(axis=1, keepdims=True)
    time_shares /= np.maximum(total, 1.0)
    rates: Floats = (speeds * time_shares).sum(axis=1)
    return rates


def fair_finishes(
    pool: Pool, table: Throughputs, rows: Sequence[int], tasks: Sequence[Task]
) -> Floats:
    """Finish time of each task under equal sharing, in seconds. Tasks are sorted by arrival."""
    arrivals = np.array([task.arrival_s for task in tasks])
    left = np.array([task.steps for task in tasks], dtype=np.float64)
    finishes = np.full(len(tasks), np.inf)
    rates_of: dict[int, Floats] = {}
    active = np.zeros(0, dtype=np.int64)
    now_s, arrived = 0.0, 0
    while arrived < len(tasks) or len(active):
        next_s = arrivals[arrived] if arrived < len(tasks) else np.inf
        if len(active):
            count = len(active)
            if count not in rates_of:
                rates_of[count] = equal_share_rates(pool, table, rows, tasks, count)
            rates = rates_of[count][active]
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
    """Equal sharing as it would have gone so far, known step by step and without the future.

    `advance` moves it to the view's time. A task that would be done by now keeps the time that it
    would have taken.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._left: dict[int, float] = {}  # Steps a fair share would have left.
        self._rates: dict[int, float] = {}
        self._done_s: dict[int, float] = {}  # Time from arrival to fair finish.

    def advance(self, view: View) -> None:
        """Give each task its equal share of the time since the last call."""
        passed_s = view.now_s - self._now_s
        for task, left in list(self._left.items()):
            rate = self._rates.get(task, 0.0)
            self._left[task] = max(0.0, left - rate * passed_s)
        present = {state.id: state for state in view.tasks}
        for task in [task for task in self._left if task not in present]:
            # Finished for real: under equal sharing it might go on, but it no longer matters.
            del self._left[task]
            self._done_s.pop(task, None)
        for task, state in present.items():
            late_s = view.now_s - state.task.arrival_s
            self._left.setdefault(task, state.task.steps)
            if self._left[task] <= 0:
                self._done_s.setdefault(task, max(late_s, 1e-9))
        rows = [state.row for state in view.tasks]
        tasks = [state.task for state in view.tasks]
        rates = equal_share_rates(view.pool, view.table, rows, tasks, len(tasks))
        self._rates = dict(zip(present, rates.tolist(), strict=True))
        self._now_s = view.now_s

    def fair_times(self, view: View) -> Floats:
        """Seconds from arrival to the fair finish, if nobody else arrived."""
        times = []
        for state in view.tasks:
            done_s = self._done_s.get(state.id)
            if done_s is None:
                age_s = view.now_s - state.task.arrival_s
                done_s = age_s + self._left[state.id] / max(self._rates[state.id], 1e-300)
            times.append(done_s)
        return np.array(times)
