"""Runs a trace through a policy, without devices: discrete events, deterministic.

Rounds work as in a pool: the policy decides at the start of a round, what it chose runs until the
round ends, and a device whose tasks are all finished stays idle until then. A round in which
everything finishes early ends early. Inside a round each finish is an event: whoever shared the
device goes on faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.schedule.allocator.fairshare import fair_finishes
from shoal.schedule.allocator.placement import Placement, place
from shoal.schedule.allocator.policy import Assignment, Plan, Policy, TaskState, View
from shoal.schedule.model.entities import Pool, Task
from shoal.schedule.model.throughputs import Floats, Throughputs

#: Fewer steps than this are rounding error of a finished task.
STEPS_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Span:
    """Tasks that shared devices for a while."""

    devices: tuple[int, ...]
    tasks: tuple[int, ...]
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """One decision, for the report."""

    start_s: float
    running: int
    waiting: int
    gap: float | None
    solve_s: float


@dataclass(slots=True)
class Result:
    """What a run gave. Arrays are in the order of the sorted trace."""

    pool: Pool
    tasks: list[Task]
    finishes_s: Floats
    fair_finishes_s: Floats
    restarts: int = 0
    busy_s: float = 0.0  # Device seconds in use.
    rounds: list[Round] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @property
    def completions_s(self) -> Floats:
        """From arrival to finish."""
        arrivals = np.array([task.arrival_s for task in self.tasks])
        completions: Floats = self.finishes_s - arrivals
        return completions

    @property
    def finish_ratios(self) -> Floats:
        """Completion time against that of equal sharing; above 1 is worse than a fair share."""
        arrivals = np.array([task.arrival_s for task in self.tasks])
        ratios: Floats = self.completions_s / (self.fair_finishes_s - arrivals)
        return ratios

    @property
    def makespan_s(self) -> float:
        return float(self.finishes_s.max() - min(task.arrival_s for task in self.tasks))

    @property
    def utilisation(self) -> float:
        return self.busy_s / (self.pool.devices * self.makespan_s)


class StuckError(RuntimeError):
    """Tasks wait, nothing runs, and nothing will change that."""


def check(view: View, plan: Plan) -> None:
    """Assert that a plan respects counts, gangs, memory and quotas. A failure is a policy's bug."""
    states = {state.id: state for state in view.tasks}
    used = [0] * len(view.pool.kinds)
    held: dict[str, int] = {}
    seen: set[int] = set()
    for assignment in plan.assignments:
        members = [states[task] for task in assignment.tasks]
        kind = view.pool.kinds[assignment.kind]
        assert members, "an assignment without tasks"
        assert seen.isdisjoint(assignment.tasks), f"a task runs twice: {assignment}"
        seen.update(assignment.tasks)
        assert len({state.task.devices for state in members}) == 1, "gangs of unequal size"
        assert all(view.may_run(state, assignment.kind) for state in members), assignment
        group = tuple(sorted(state.row for state in members))
        assert view.table.rates(assignment.kind, group) is not None, "cannot run together"
        assert view.table.fits(assignment.kind, group, kind.memory_bytes), "over the memory"
        used[assignment.kind] += members[0].task.devices
        for state in members:
            held[state.task.owner] = held.get(state.task.owner, 0) + state.task.devices
    for kind, count in zip(view.pool.kinds, used, strict=True):
        assert count <= kind.count, f"{count} of {kind.count} {kind.name}"
    for owner, limit in view.pool.quotas.items():
        assert held.get(owner, 0) <= limit, f"{owner} holds {held[owner]} of {limit}"


class Simulation:
    """One run. `step` is one round; `run` is all of them.

    >>> table = Throughputs(("gpu",), [("lm", 1)], np.array([[10.0]]))
    >>> from shoal.schedule.policies.fifo import Fifo
    >>> tasks = [Task("a", "lm", 3600.0), Task("b", "lm", 7200.0)]
    >>> run = Simulation(Pool.parse("gpu:1"), table, tasks, Fifo(), round_s=360)
    >>> run.run().finishes_s.tolist()
    [360.0, 1080.0]
    """

    def __init__(
        self,
        pool: Pool,
        table: Throughputs,
        tasks: Sequence[Task],
        policy: Policy,
        round_s: float = 360.0,
        restart_cost_s: float = 0.0,
        together_max: int = 2,
        keep_spans: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.pool, self.policy = pool, policy
        self.table = table.select(pool.names)
        self.tasks = sorted(tasks, key=lambda task: task.arrival_s)
        self.rows = [self.table.row_of[task.type, task.devices] for task in self.tasks]
        self.round_s, self.restart_cost_s = round_s, restart_cost_s
        self.together_max, self.keep_spans, self.clock = together_max, keep_spans, clock
        self.now_s = self.tasks[0].arrival_s
        self.arrived = 0
        self.active: dict[int, TaskState] = {}
        self.placement: Placement = {}
        self._open_spans: dict[tuple[int, ...], Span] = {}
        self.result = Result(
            pool,
            self.tasks,
            np.full(len(self.tasks), np.nan),
            fair_finishes(pool, self.table, self.rows, self.tasks),
        )

    @property
    def finished(self) -> int:
        return self.arrived - len(self.active)

    def run(self, progress: Callable[[int, int], None] | None = None) -> Result:
        """Run to the end; `progress(finished, total)` is called after each round."""
        while self.step():
            if progress is not None:
                progress(self.finished, len(self.tasks))
        self.result.spans += self._open_spans.values()
        self._open_spans.clear()
        self.result.spans.sort(key=lambda span: (span.start_s, span.devices))
        return self.result

    def step(self) -> bool:
        """Simulate one round; False when all tasks are finished."""
        decided = self.decide()
        if decided is None:
            return False
        self.carry_out(decided[1])
        return True

    def decide(self) -> tuple[View, Plan] | None:
        """Return what the policy sees now and what it answers; None when all tasks are finished.

        `carry_out` is to follow: the policy keeps count of its rounds.
        """
        self._arrive()
        if not self.active:
            if self.arrived == len(self.tasks):
                return None
            self.now_s = self.tasks[self.arrived].arrival_s
            self._arrive()
        view = View(
            self.now_s,
            self.round_s,
            self.restart_cost_s,
            self.pool,
            self.table,
            list(self.active.values()),
            self.together_max,
        )
        before_s = self.clock()
        plan = self.policy.decide(view)
        solve_s = self.clock() - before_s
        check(view, plan)
        running = sum(len(assignment.tasks) for assignment in plan.assignments)
        self.result.rounds.append(
            Round(self.now_s, running, len(self.active) - running, plan.gap, solve_s)
        )
        return view, plan

    def carry_out(self, plan: Plan) -> None:
        """Run the round that was decided."""
        if not plan.assignments:
            self._idle()
        else:
            self._run_round(plan.assignments)

    def _arrive(self) -> None:
        while self.arrived < len(self.tasks) and self.tasks[self.arrived].arrival_s <= self.now_s:
            task = self.tasks[self.arrived]
            self.active[self.arrived] = TaskState(
                self.arrived, task, self.rows[self.arrived], task.steps
            )
            self.arrived += 1

    def _idle(self) -> None:
        """Skip to the next arrival: nothing runs."""
        if self.arrived == len(self.tasks):
            names = ", ".join(state.task.name for state in list(self.active.values())[:5])
            raise StuckError(
                f"policy {self.policy.name} runs nothing, and no task arrives any more; "
                f"{len(self.active)} wait: {names}"
            )
        self._move({})
        self.now_s = self.tasks[self.arrived].arrival_s

    def _run_round(self, assignments: tuple[Assignment, ...]) -> None:
        gangs = {i: s.task.devices for i, s in self.active.items()}
        after = place(self.pool, assignments, gangs, self.placement)
        resumed = self._move(after)
        ends = [
            self._run_group(assignment, after[assignment.tasks[0]], resumed)
            for assignment in assignments
        ]
        # All running tasks may finish before the round does: then the next round starts at once.
        self.now_s = max(ends)
        for task in [i for i, s in self.active.items() if s.steps_left <= STEPS_EPSILON]:
            del self.active[task]
            self.placement.pop(task, None)

    def _move(self, after: Placement) -> set[int]:
        """Take over the new placement; return the tasks that pay for a restart."""
        resumed = {
            task
            for task, devices in after.items()
            if self.active[task].started and self.placement.get(task) != devices
        }
        self.result.restarts += len(resumed)
        self.placement = dict(after)
        for state in self.active.values():
            state.started = state.started or state.id in after
            if state.id not in after:
                state.kind = None
        return resumed

    def _run_group(
        self, assignment: Assignment, devices: tuple[int, ...], resumed: set[int]
    ) -> float:
        """Run co-located tasks through the round; return when the last of them stopped."""
        end_s = self.now_s + self.round_s
        members = [self.active[task] for task in assignment.tasks]
        ready_s = {
            s.id: self.now_s + (self._restart_s(s) if s.id in resumed else 0.0) for s in members
        }
        for state in members:
            state.kind = assignment.kind
        time_s, last_s = self.now_s, self.now_s
        left = list(members)
        while left and time_s < end_s:
            until_s = self._advance(assignment.kind, left, ready_s, time_s, end_s)
            for state in left:
                if state.steps_left <= STEPS_EPSILON:
                    self.result.finishes_s[state.id] = until_s
            left = [state for state in left if state.steps_left > STEPS_EPSILON]
            time_s = last_s = until_s
        self.result.busy_s += (last_s - self.now_s) * len(devices)
        self._record(devices, assignment.tasks, last_s)
        return last_s

    def _restart_s(self, state: TaskState) -> float:
        return self.restart_cost_s if state.restart_cost_s is None else state.restart_cost_s

    def _advance(
        self,
        kind: int,
        left: list[TaskState],
        ready_s: dict[int, float],
        time_s: float,
        end_s: float,
    ) -> float:
        """Progress `left` to the next event: a finish, the end of a restart or of the round."""
        order = sorted(left, key=lambda state: state.row)
        rates = self.table.rates(kind, tuple(state.row for state in order))
        assert rates is not None
        moving = {
            state.id: rate if ready_s[state.id] <= time_s else 0.0
            for state, rate in zip(order, rates, strict=True)
        }
        until_s = min([end_s, *(t for t in ready_s.values() if t > time_s)])
        for state in left:
            if moving[state.id] > 0:
                until_s = min(until_s, time_s + state.steps_left / moving[state.id])
        for state in left:
            done = moving[state.id] * (until_s - time_s)
            # The relative part keeps a finish from being missed by rounding when time_s is large.
            state.steps_left -= done
            if state.steps_left <= 1e-9 * state.task.steps:
                state.steps_left = 0.0
        return until_s

    def _record(self, devices: tuple[int, ...], tasks: tuple[int, ...], end_s: float) -> None:
        if not self.keep_spans or end_s <= self.now_s:
            return
        last = self._open_spans.get(devices)
        if last is not None and last.tasks == tasks and last.end_s == self.now_s:
            self._open_spans[devices] = Span(devices, tasks, last.start_s, end_s)
            return
        if last is not None:
            self.result.spans.append(last)
        self._open_spans[devices] = Span(devices, tasks, self.now_s, end_s)
