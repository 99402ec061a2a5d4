"""What a policy sees, what it answers, and how it is found by name.

A policy is a function from the pool's state to a plan. It has no clock, no input or output and no
randomness; what it remembers between rounds it keeps in itself. The pool and the simulator call
the same code.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from shoal.schedule.model.entities import Pool, Task
from shoal.schedule.model.throughputs import Group, Throughputs


@dataclass(slots=True)
class TaskState:
    """A task that has arrived and is not finished."""

    id: int  # Order of arrival; unique in a run.
    task: Task
    row: int  # Its row in the throughput table.
    steps_left: float
    kind: int | None = None  # Where it ran in the last round; None: it waited.
    started: bool = False
    restart_cost_s: float | None = None  # Lost when it resumes or moves; None: as in the view.


@dataclass(frozen=True, slots=True)
class View:
    """What a policy may know when it decides about one round."""

    now_s: float
    round_s: float
    restart_cost_s: float  # Lost by a task that resumes, or moves to other devices.
    pool: Pool
    table: Throughputs  # Its kinds are the pool's, in the pool's order.
    tasks: Sequence[TaskState]  # By id.
    together_max: int = 2

    def restart_s(self, state: TaskState) -> float:
        """Return what the task loses when it resumes, or moves to other devices."""
        return self.restart_cost_s if state.restart_cost_s is None else state.restart_cost_s

    def may_run(self, state: TaskState, kind: int) -> bool:
        """Return whether the task can run on this kind at all: declared, with a speed, and fitting."""
        place = self.pool.kinds[kind]
        return (
            (state.task.kinds is None or place.name in state.task.kinds)
            and state.task.devices <= place.count
            and self.table.alone[state.row, kind] > 0
            and self.table.fits(kind, (state.row,), place.memory_bytes)
        )

    def runnable(self) -> View:
        """Return the view without tasks that no kind of this pool can ever run."""
        kinds = range(len(self.pool.kinds))
        tasks = [s for s in self.tasks if any(self.may_run(s, kind) for kind in kinds)]
        return self if len(tasks) == len(self.tasks) else replace(self, tasks=tasks)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Tasks that share one set of devices of a kind for the coming round."""

    kind: int
    tasks: tuple[int, ...]  # Ids; more than one: co-located.


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs in the coming round. A task that is in no assignment waits.

    `value` and `bound` are in the policy's own objective (higher is better): the plan is at most
    `gap` away from the best that any plan could reach for this round.
    """

    assignments: tuple[Assignment, ...]
    value: float | None = None
    bound: float | None = None
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def gap(self) -> float | None:
        if self.value is None or self.bound is None:
            return None
        return max(0.0, (self.bound - self.value) / max(abs(self.bound), 1e-12))


class Policy(ABC):
    """Base of all policies. A subclass in `shoal/schedule/policies/` is found by its `name`."""

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""

    @abstractmethod
    def decide(self, view: View) -> Plan:
        """Decide what runs in the coming round."""

    def state(self) -> dict[str, Any]:
        """Return what it remembers, as JSON has it: a new instance goes on with it."""
        return {}

    def restore(self, state: dict[str, Any], view: View) -> None:  # noqa: B027
        """Take over what an earlier instance remembered. `view` is the next to be decided."""


def policies() -> dict[str, type[Policy]]:
    """Return all policies by name, from the files of `shoal/schedule/policies/`."""
    package = importlib.import_module("shoal.schedule.policies")
    found: dict[str, type[Policy]] = {}
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
        contents = importlib.import_module(f"{package.__name__}.{module.name}")
        for value in vars(contents).values():
            if isinstance(value, type) and issubclass(value, Policy) and value.name:
                found[value.name] = value
    return found


class Room:
    """What is still free while a plan is put together: devices of each kind, and quotas.

    >>> room = Room(view)  # doctest: +SKIP
    >>> room.take([state], kind=0)  # doctest: +SKIP
    True
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.free = [kind.count for kind in view.pool.kinds]
        self.quota = dict(view.pool.quotas)
        self.assignments: list[Assignment] = []

    def fits(self, states: Sequence[TaskState], kind: int) -> bool:
        """Return whether these tasks can share one set of devices of the kind now."""
        devices = states[0].task.devices
        if devices > self.free[kind] or any(s.task.devices != devices for s in states):
            return False
        if not all(self.view.may_run(state, kind) for state in states):
            return False
        if len(states) > 1:
            group: Group = tuple(sorted(state.row for state in states))
            if len(states) > self.view.together_max or not self.view.table.fits(
                kind, group, self.view.pool.kinds[kind].memory_bytes
            ):
                return False
            if self.view.table.rates(kind, group) is None:
                return False
        return self._within_quota(states)

    def _within_quota(self, states: Sequence[TaskState]) -> bool:
        if not self.quota:
            return True
        wanted: dict[str, int] = {}
        for state in states:
            owner = state.task.owner
            wanted[owner] = wanted.get(owner, 0) + state.task.devices
        return all(need <= self.quota.get(owner, need) for owner, need in wanted.items())

    def take(self, states: Sequence[TaskState], kind: int) -> bool:
        """Assign the tasks if they fit. Return whether they did."""
        if not self.fits(states, kind):
            return False
        self.free[kind] -= states[0].task.devices
        for state in states:
            if state.task.owner in self.quota:
                self.quota[state.task.owner] -= state.task.devices
        self.assignments.append(Assignment(kind, tuple(sorted(state.id for state in states))))
        return True


def fill(view: View, order: Iterable[TaskState]) -> Plan:
    """Go through the tasks in order; each takes the fastest kind that still has room for it."""
    room = Room(view)
    speeds = view.table.alone
    for state in order:
        for kind in sorted(range(len(view.pool.kinds)), key=lambda k: -speeds[state.row, k]):
            if room.take([state], kind):
                break
    return Plan(tuple(room.assignments))
