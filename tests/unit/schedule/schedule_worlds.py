"""Small random worlds for property tests: a pool, a table with memory and contention, tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from shoal.schedule.allocator.policy import TaskState, View
from shoal.schedule.model.entities import Kind, Pool, Task
from shoal.schedule.model.throughputs import Throughputs

GIB = 2**30


@st.composite
def tables(draw: Any) -> Throughputs:
    """Two or three kinds, up to four types, gangs of 1 and 2, some pairs measured."""
    kinds = tuple(f"kind{n}" for n in range(draw(st.integers(1, 3))))
    rows = [(f"type{n}", 1) for n in range(draw(st.integers(1, 4)))]
    rows += [(name, 2) for name, _ in rows[:2]]
    shape = (len(rows), len(kinds))
    speed = st.sampled_from([0.0, 0.5, 1.0, 3.0, 10.0])
    alone = np.array([[draw(speed) for _ in kinds] for _ in rows])
    alone[:, 0] = np.maximum(alone[:, 0], 0.5)  # Every type runs somewhere.
    memory = np.array([[draw(st.integers(1, 12)) * GIB] * len(kinds) for _ in rows], dtype=float)
    busy = np.array(
        [[[draw(st.floats(0.1, 1.0)) for _ in range(2)] for _ in kinds] for _ in rows]
    ).reshape(*shape, 2)
    measured = {}
    if draw(st.booleans()):
        both = (draw(st.floats(0.0, 1.0)), draw(st.floats(0.1, 1.0)))
        measured[0, (0, 0)] = (float(alone[0, 0]) * both[1],) * 2
        if shape[0] > 3:
            measured[0, (0, 1)] = (float(alone[0, 0]) * both[0], float(alone[1, 0]) * both[1])
    return Throughputs(kinds, rows, alone, memory, busy, measured)


@st.composite
def worlds(
    draw: Any, tasks_max: int = 7, quotas: bool = True
) -> tuple[Pool, Throughputs, list[Task]]:
    table = draw(tables())
    pool = Pool(
        tuple(Kind(name, draw(st.integers(2, 4)), 16 * GIB) for name in table.kinds),
        {"ana": draw(st.integers(2, 4))} if quotas and draw(st.booleans()) else {},
    )
    tasks = []
    for number in range(draw(st.integers(1, tasks_max))):
        name, devices = draw(st.sampled_from(table.rows))
        tasks.append(
            Task(
                name=f"task{number}",
                type=name,
                steps=draw(st.sampled_from([10.0, 400.0, 2000.0, 9000.0])),
                arrival_s=draw(st.sampled_from([0.0, 0.0, 100.0, 2000.0])),
                devices=devices,
                weight=draw(st.sampled_from([1.0, 1.0, 4.0])),
                kinds=draw(st.sampled_from([None, None, frozenset(["kind0"])])),
                owner=draw(st.sampled_from(["ana", "ben"])),
            )
        )
    return pool, table, tasks


@st.composite
def views(draw: Any) -> View:
    """A moment in a world: some tasks have run before, some are nearly done."""
    pool, table, tasks = draw(worlds(tasks_max=10))
    chosen = table.select(pool.names)
    states = []
    for number, task in enumerate(tasks):
        state = TaskState(number, task, chosen.row_of[task.type, task.devices], task.steps)
        state.steps_left *= draw(st.sampled_from([1.0, 0.5, 0.01]))
        if draw(st.booleans()):
            state.kind, state.started = 0, True
        states.append(state)
    cost_s = draw(st.sampled_from([0.0, 60.0]))
    return View(5000.0, 360.0, cost_s, pool, chosen, states, draw(st.integers(1, 4)))
