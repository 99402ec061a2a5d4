"""The fair reference: when would each task finish if all present tasks shared the pool equally?

A fluid model that no scheduler can run exactly: at each moment each of the n present tasks has one
n-th of the devices of each kind. It depends on the trace alone, not on the schedule that is
judged, so ratios of different policies can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.schedule.model import Pool, Task
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
