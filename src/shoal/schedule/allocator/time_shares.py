"""Turns time shares into rounds, for policies that answer "how much" instead of "what now".

A share policy says which fraction of the time each task (or group of tasks) should spend on each
kind. Each round then runs whoever is furthest behind its share, as Gavel (OSDI 2020) does: priority
is share over fraction of time received since the shares were last computed. Shares are computed
anew when tasks came or went, but not more often than every `RESET_S`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from shoal.schedule.allocator.policy import Plan, Policy, Room, TaskState, View
from shoal.schedule.model.throughputs import Floats

#: Shares need time to take effect before they are computed anew.
RESET_S = 1920.0

Ids = tuple[int, ...]
Shares = dict[Ids, Floats]  # Group of task ids -> fraction of time on each kind.


class SharePolicy(Policy):
    """Base of share policies: a subclass answers `shares`."""

    #: Fill kinds in the pool's order (the fastest first), or start at another kind each round.
    in_order: ClassVar[bool] = True
    #: May a task without a share run where there is room?
    work_conserving: ClassVar[bool] = True

    def __init__(self) -> None:
        self._shares: Shares = {}
        self._received_s: Shares = {}
        self._deficit_s: Shares = {}
        self._last_reset_s = -np.inf
        self._members: frozenset[int] = frozenset()
        self._last: tuple[float, Plan] | None = None
        self._rounds = 0

    @abstractmethod
    def shares(self, view: View) -> Shares:
        """Return the fraction of the coming time on each kind, for single tasks and groups."""

    def decide(self, view: View) -> Plan:
        view = view.runnable()
        self._account(view)
        members = frozenset(state.id for state in view.tasks)
        due = view.now_s - self._last_reset_s >= RESET_S
        idle = self._last is not None and not self._last[1].assignments
        if members != self._members and (due or idle):
            self._reset(view)
            self._members = members
        plan = self._most_behind(view)
        self._last = (view.now_s, plan)
        self._rounds += 1
        return plan

    def _reset(self, view: View) -> None:
        elapsed_s = view.now_s - self._last_reset_s
        if self._shares and np.isfinite(elapsed_s):
            for ids, share in self._shares.items():
                owed = share * elapsed_s - (self._received_s.get(ids, 0.0) - view.round_s / 2)
                self._deficit_s[ids] = self._deficit_s.get(ids, 0.0) + owed
        self._shares = self.shares(view)
        start = np.full(len(view.pool.kinds), view.round_s / 2)
        self._received_s = {ids: start.copy() for ids in self._shares}
        self._last_reset_s = view.now_s

    def _account(self, view: View) -> None:
        """Credit the groups that ran in the last round, and forget those that are gone."""
        present = {state.id for state in view.tasks}
        if self._last is not None:
            before_s, plan = self._last
            for assignment in plan.assignments:
                received = self._received_s.get(assignment.tasks)
                if received is not None:
                    received[assignment.kind] += view.now_s - before_s
        for table in (self._shares, self._received_s, self._deficit_s):
            for ids in [ids for ids in table if not present.issuperset(ids)]:
                del table[ids]

    def _most_behind(self, view: View) -> Plan:
        """Choose greedily by priority, then deficit, then share; tasks without a share come last."""
        states = {state.id: state for state in view.tasks}
        kinds = list(range(len(view.pool.kinds)))
        if not self.in_order:
            turn = self._rounds % len(kinds)
            kinds = kinds[turn:] + kinds[:turn]
        room, placed = Room(view), set[int]()
        total = sum(self._received_s.values(), np.zeros(len(kinds)))
        singles = [(state.id,) for state in view.tasks]
        none = np.zeros(len(kinds))
        for kind in kinds:
            queue = []
            for ids in [*(i for i in self._shares if len(i) > 1), *singles]:
                share = float(self._shares.get(ids, none)[kind])
                fraction = float(self._received_s.get(ids, none)[kind]) / max(total[kind], 1e-9)
                priority = share * 1e9 if fraction == 0 else share / fraction
                if share == 0.0 and not self.work_conserving:
                    continue
                deficit = float(self._deficit_s.get(ids, none)[kind])
                queue.append((-priority, -deficit, -share, ids))
            for _, _, _, ids in sorted(queue):
                if room.free[kind] == 0:
                    break
                members: list[TaskState] = [states[i] for i in ids]
                if placed.isdisjoint(ids) and room.take(members, kind):
                    placed.update(ids)
        return Plan(tuple(room.assignments))
