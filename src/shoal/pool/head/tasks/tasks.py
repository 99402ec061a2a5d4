"""All that the head does for tasks: joins the parts of this room and connects them with the head."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shoal.pool.base.clock import Clock, Randomness
from shoal.pool.head.admitting import Admitting
from shoal.pool.head.leases import LeaseTable
from shoal.pool.head.nodes import Nodes
from shoal.pool.head.session_reports import SessionReports
from shoal.pool.head.store import Store
from shoal.pool.head.tasks.elsewhere import Elsewhere
from shoal.pool.head.tasks.lifecycle import TaskLifecycle
from shoal.pool.head.tasks.live_plan import LivePlan
from shoal.pool.head.tasks.plans import TaskPlans
from shoal.pool.head.tasks.task_requests import TaskRequests
from shoal.pool.planner.rounds import Planner
from shoal.pool.wire.roles import Principal
from shoal.pool.wire.tls import Peer


class Tasks:
    """`on_change` is called when a task or its reasons may have changed.

    Args:
        end_lease: ends the lease of an attempt that has ended.
        elsewhere: what is special about tasks on machines of others.
    """

    def __init__(
        self,
        store: Store,
        table: LeaseTable,
        admitting: Admitting,
        clock: Clock,
        randomness: Randomness,
        end_lease: Callable[[int], None],
        elsewhere: Elsewhere,
    ) -> None:
        self.lifecycle = TaskLifecycle(
            store, table, clock, randomness, self._changed, end_lease, elsewhere
        )
        self.on_change: Callable[[], None] = lambda: None
        self.lifecycle.rows.on_change = lambda: self.on_change()
        self.plans = TaskPlans(self.lifecycle, admitting, table, clock)
        self.requests = TaskRequests(self.lifecycle, self.plans, store, table, clock)
        self.runners = self.lifecycle.runners
        self.live: LivePlan | None = None  # None: by the rule of admission alone
        self._parts = (admitting, table, clock, store)

    def plan(self, planner: Planner | None, nodes: Nodes, reports: SessionReports) -> None:
        """Let a planner decide from now on. Call it before `run`."""
        admitting, table, clock, store = self._parts
        self.live = LivePlan(
            self.lifecycle, admitting, table, nodes, reports, planner, clock, store
        )
        self.plans.live = self.live
        if planner is None:
            self.live.suspending.line_up = self.plans.line_up
        reports.on_change = self.live.woken_by_report

    @property
    def planner_pid(self) -> int | None:
        planner = self.live.planner if self.live is not None else None
        return planner.pid if planner is not None else None

    def _changed(self) -> None:
        self.plans.wake()
        self.on_change()

    def principal(self, peer: Peer) -> Principal:
        """Return who the program of an attempt is, on another's machine."""
        return self.lifecycle.elsewhere.principal(peer, self.lifecycle.index.tasks.get)

    async def run(self) -> None:
        """Start tasks and send what follows their commits, for ever."""
        self.plans.wake()
        work = [self.lifecycle.outbox.run(), self.plans.run()]
        if self.live is not None:
            work.append(self.live.run())
        await asyncio.gather(*work)
