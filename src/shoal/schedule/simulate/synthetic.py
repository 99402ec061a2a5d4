"""Makes traces from a seed, to try a policy on work that it was not tuned on."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from shoal.schedule.model.entities import Pool, Task
from shoal.schedule.model.throughputs import Throughputs

#: Gang sizes and how often they are drawn, where the table has them.
GANG_SHARES = ((1, 0.70), (2, 0.10), (4, 0.15), (8, 0.05))


def generate(
    table: Throughputs,
    pool: Pool,
    tasks: int,
    seed: int,
    tasks_per_hour: float = 0.0,
    hours: tuple[float, float] = (0.1, 10.0),
    owners: Sequence[str] = (),
) -> list[Task]:
    """Tasks of random types, durations and arrivals.

    Args:
        tasks_per_hour: Poisson arrivals; 0: all at the start.
        hours: Least and most duration on the type's fastest kind; the logarithm is uniform.
        owners: Drawn evenly, if any.
    """
    draw = random.Random(seed)
    chosen = table.select(pool.names)
    most = max(kind.count for kind in pool.kinds)
    by_gang: dict[int, list[int]] = {}
    for row, (_, devices) in enumerate(chosen.rows):
        if devices <= most and _runs(chosen, pool, row):
            by_gang.setdefault(devices, []).append(row)
    gangs = [(devices, share) for devices, share in GANG_SHARES if devices in by_gang]
    made, arrival_s = [], 0.0
    for number in range(tasks):
        devices = draw.choices([g for g, _ in gangs], [share for _, share in gangs])[0]
        row = draw.choice(by_gang[devices])
        log_hours = draw.uniform(math.log(hours[0]), math.log(hours[1]))
        steps = math.exp(log_hours) * 3600 * float(chosen.best[row])
        if tasks_per_hour > 0:
            arrival_s += draw.expovariate(tasks_per_hour / 3600)
        made.append(
            Task(
                name=f"task-{number}",
                type=chosen.rows[row][0],
                steps=max(1.0, float(round(steps))),
                arrival_s=arrival_s,
                devices=devices,
                owner=draw.choice(list(owners)) if owners else "",
            )
        )
    return made


def _runs(table: Throughputs, pool: Pool, row: int) -> bool:
    return any(
        table.alone[row, place] > 0
        and table.rows[row][1] <= kind.count
        and table.fits(place, (row,), kind.memory_bytes)
        for place, kind in enumerate(pool.kinds)
    )
