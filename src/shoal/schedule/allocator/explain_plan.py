"""Explains why a task waits, what would let it run, and when it will. Gives all reasons."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec

from shoal.schedule.allocator.policy import Assignment, Plan, TaskState, View
from shoal.units import show_bytes


class Reason(msgspec.Struct, frozen=True):
    """`code` for programs, `text` for people."""

    code: str
    text: str


class Explanation(msgspec.Struct, frozen=True):
    """`starts_in_s` is an estimate that assumes no further arrivals; None: never."""

    task: str
    running: bool
    reasons: list[Reason]
    unblock: list[str]
    starts_in_s: float | None
    ends_in_s: float | None
    #: No schedule ends it sooner: alone on the fastest kind that it may use, from now on.
    earliest_end_s: float | None

    @property
    def gap(self) -> float | None:
        """The estimated end over that bound, minus 1: 0.5 is half as long again."""
        if self.ends_in_s is None or not self.earliest_end_s:
            return None
        return max(0.0, self.ends_in_s / self.earliest_end_s - 1)


def explain(view: View, plan: Plan, task: int) -> Explanation:
    """Explain one task under a plan.

    >>> explain(view, plan, task=3).reasons[0].text  # doctest: +SKIP
    'v100: all 8 devices are taken by tasks that save more waiting (…)'
    """
    states = {state.id: state for state in view.tasks}
    state = states[task]
    mine = next((a for a in plan.assignments if task in a.tasks), None)
    earliest_s = _earliest_end_s(view, state)
    if mine is not None:
        running, lasts_s = [_running(view, states, mine, task)], _duration(view, state, mine)
        return Explanation(state.task.name, True, running, [], 0.0, lasts_s, earliest_s)
    start_s, end_s = _estimates(view, plan).get(task, (None, None))
    reasons, unblock = _quota(view, states, plan, state)
    for kind in range(len(view.pool.kinds)):
        reason, remedy = _kind(view, states, plan, state, kind)
        reasons.append(reason)
        unblock += remedy
    if start_s is not None:
        unblock.append(f"waiting about {start_s / 60:.0f} min, if nobody else arrives")
    unblock = list(dict.fromkeys(unblock))
    return Explanation(state.task.name, False, reasons, unblock, start_s, end_s, earliest_s)


def _running(view: View, states: dict[int, TaskState], mine: Assignment, task: int) -> Reason:
    kind = view.pool.kinds[mine.kind].name
    others = [states[i].task.name for i in mine.tasks if i != task]
    beside = f" beside {', '.join(others)}" if others else ""
    return Reason("running", f"runs on {states[task].task.devices} {kind}{beside}")


def _quota(
    view: View, states: dict[int, TaskState], plan: Plan, state: TaskState
) -> tuple[list[Reason], list[str]]:
    owner, quota = state.task.owner, view.pool.quotas.get(state.task.owner)
    if quota is None:
        return [], []
    held = sum(
        states[i].task.devices
        for a in plan.assignments
        for i in a.tasks
        if states[i].task.owner == owner
    )
    if held + state.task.devices <= quota:
        return [], []
    text = f"{owner} holds {held} of {quota} devices and this task needs {state.task.devices} more"
    return [Reason("quota", text)], [f"a quota of {held + state.task.devices} for {owner}"]


def _kind(
    view: View, states: dict[int, TaskState], plan: Plan, state: TaskState, kind: int
) -> tuple[Reason, list[str]]:
    """Say why the task does not run on this kind, and what would change that."""
    place, task = view.pool.kinds[kind], state.task
    if task.kinds is not None and place.name not in task.kinds:
        return Reason("kind", f"{place.name}: the task did not ask for it"), [
            f"allowing {place.name}"
        ]
    if view.table.alone[state.row, kind] <= 0:
        return Reason("speed", f"{place.name}: this type of task does not run there"), []
    if not view.table.fits(kind, (state.row,), place.memory_bytes):
        need = show_bytes(view.table.memory_bytes[state.row, kind])
        has = show_bytes(place.memory_bytes)
        text = f"{place.name}: needs {need} of memory, a device has {has}"
        return Reason("memory", text), [f"{place.name} with {need}", "a smaller batch"]
    if task.devices > place.count:
        text = f"{place.name}: needs {task.devices} at once, there are {place.count}"
        return Reason("gang", text), [f"{task.devices - place.count} more {place.name}"]
    return _taken(view, states, plan, state, kind)


def _taken(
    view: View, states: dict[int, TaskState], plan: Plan, state: TaskState, kind: int
) -> tuple[Reason, list[str]]:
    place, needs = view.pool.kinds[kind], state.task.devices
    here = [a for a in plan.assignments if a.kind == kind]
    used = sum(states[a.tasks[0]].task.devices for a in here)
    free = place.count - used
    if free >= needs:
        text = f"{place.name}: {free} are free, but running it elsewhere later ends sooner"
        return Reason("better-later", text), []
    names = [states[i].task.name for a in here for i in a.tasks]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    price = plan.notes.get(f"price:{place.name}")
    bid = f"; a device is worth {price / 60:.1f} min of waiting now" if price else ""
    text = (
        f"{place.name}: {free} of {place.count} free, needs {needs}; "
        f"the rest runs {shown}, which saves more waiting{bid}"
    )
    return Reason("outbid", text), [
        f"{needs - free} more {place.name}",
        *_sharing(view, states, here, state, kind),
    ]


def _sharing(
    view: View,
    states: dict[int, TaskState],
    here: Sequence[Assignment],
    state: TaskState,
    kind: int,
) -> list[str]:
    """Say what prevents co-location if all tasks on the kind refuse it."""
    memory = 0
    for assignment in here:
        rows = tuple(sorted([state.row, *(states[i].row for i in assignment.tasks)]))
        if states[assignment.tasks[0]].task.devices != state.task.devices:
            continue
        if not view.table.fits(kind, rows, view.pool.kinds[kind].memory_bytes):
            memory += 1
    if memory and memory == len(here):
        return [f"less memory: beside what runs on {view.pool.kinds[kind].name} it does not fit"]
    return []


def _duration(view: View, state: TaskState, mine: Assignment) -> float:
    """Return the seconds of running that are left at the present speed."""
    rows = {s.id: s.row for s in view.tasks}
    order = sorted(mine.tasks, key=lambda i: rows[i])
    rates = view.table.rates(mine.kind, tuple(rows[i] for i in order))
    assert rates is not None
    return state.steps_left / rates[order.index(state.id)]


def _earliest_end_s(view: View, state: TaskState) -> float | None:
    kinds = [k for k in range(len(view.pool.kinds)) if view.may_run(state, k)]
    if not kinds:
        return None
    # Beside others a task may be measured to run even faster than alone.
    rates = [float(view.table.alone[state.row, k]) for k in kinds]
    rates += [
        rate
        for (kind, group), found in view.table.measured.items()
        if kind in kinds
        for row, rate in zip(group, found, strict=True)
        if row == state.row
    ]
    return state.steps_left / max(rates)


def _estimates(view: View, plan: Plan) -> dict[int, tuple[float, float]]:
    """Estimate when each waiting task starts and ends, if devices go to the task with least work left.

    A list schedule over the finish times of what runs now: cheap enough to answer a question with.
    """
    states = {state.id: state for state in view.tasks}
    free = [kind.count for kind in view.pool.kinds]
    ends: list[tuple[float, int, int]] = []  # (time, kind, devices)
    running: set[int] = set()
    for a in plan.assignments:
        running.update(a.tasks)
        devices = states[a.tasks[0]].task.devices
        free[a.kind] -= devices
        last_s = max(_duration(view, states[i], a) for i in a.tasks)
        heapq.heappush(ends, (last_s, a.kind, devices))
    waiting = [state for state in view.runnable().tasks if state.id not in running]
    waiting.sort(key=lambda s: s.steps_left / view.table.best[s.row] / s.task.weight)
    found: dict[int, tuple[float, float]] = {}
    while waiting and ends:
        now_s, kind, devices = heapq.heappop(ends)
        free[kind] += devices
        for state in list(waiting):
            if state.task.devices <= free[kind] and view.may_run(state, kind):
                lasts_s = state.steps_left / float(view.table.alone[state.row, kind])
                found[state.id] = (now_s, now_s + lasts_s)
                free[kind] -= state.task.devices
                heapq.heappush(ends, (now_s + lasts_s, kind, state.task.devices))
                waiting.remove(state)
    return found
