"""Suspends tasks in place and lets them go on: orders to device servers, and what becomes of them.

A task counts as suspended when the workers of all its devices say so; only then its memory is free
for others in the lease table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.pool.base import limits
from shoal.pool.base.clock import Clock
from shoal.pool.head.admitting import Admitting
from shoal.pool.head.leases import Granted, LeaseTable
from shoal.pool.head.nodes import Nodes
from shoal.pool.head.session_reports import SessionReports
from shoal.pool.head.tasks.lifecycle import TaskLifecycle
from shoal.pool.head.tasks.rows import Entry
from shoal.tasks import states
from shoal.tasks.states import State

_TEXTS = {
    "accelerator": "the memory of its device does not page",
    "shares": "other programs map its memory",
    "peers": "other devices of its lease read its memory",
    "reader": "a data reader writes samples for it",
    "host-full": "the host has no room for its memory",
    "late": f"its worker did not stop within {limits.SUSPEND_S:g} s",
}


@dataclass(slots=True)
class _Order:
    attempt: int
    suspend: bool
    since: float  # monotonic


class Suspending:
    def __init__(
        self,
        lifecycle: TaskLifecycle,
        admitting: Admitting,
        table: LeaseTable,
        nodes: Nodes,
        reports: SessionReports,
        clock: Clock,
    ) -> None:
        self._lifecycle = lifecycle
        self._index = lifecycle.index
        self._admitting = admitting
        self._table = table
        self._nodes = nodes
        self._reports = reports
        self._clock = clock
        self._orders: dict[int, _Order] = {}  # by task: not obeyed yet
        self._refused: dict[int, tuple[int, str]] = {}  # by task: the attempt, and why
        # Puts a suspended task back in line; None: a planner says when it goes on.
        self.line_up: Callable[[Entry], None] | None = None
        self._told: dict[int, int] = {}  # by task: the lease whose workers know what is wanted

    def is_running(self, entry: Entry) -> bool | None:
        """Return whether a task runs, and False if it is suspended; None: no plan can change that."""
        granted = self._lease_of(entry)
        state = entry.task.state
        if granted is None or state not in (State.RUNNING, State.SUSPENDED):
            return None
        if state is State.SUSPENDED:
            order = self._orders.get(entry.number)
            return None if order is not None else False
        if entry.number in self._orders or len(granted.shares) > 1:
            return None  # several devices read each other's memory
        if self._refused.get(entry.number, (0, ""))[0] == entry.task.attempt:
            return None
        if any(not self._elastic(share.device) for share in granted.shares):
            return None
        return True

    def _elastic(self, number: int) -> bool:
        device = self._table.devices.get(number)
        return device is not None and device.elastic and device.present

    def _lease_of(self, entry: Entry) -> Granted | None:
        return self._table.leases.get(entry.lease) if entry.lease is not None else None

    def refusals(self) -> dict[str, str]:
        """Return, by running task, why it cannot be suspended."""
        running = [self._index.tasks[number] for number in self._index.active]
        running = [entry for entry in running if entry.task.state is State.RUNNING]
        found = {entry.id: self._why_not(entry) for entry in running}
        return {task: _TEXTS.get(reason, reason) for task, reason in found.items() if reason}

    def _why_not(self, entry: Entry) -> str:
        attempt, reason = self._refused.get(entry.number, (0, ""))
        if attempt == entry.task.attempt:
            return reason
        granted = self._lease_of(entry)
        if granted is None:
            return ""  # it will lease its devices, or never does
        if len(granted.shares) > 1:
            return "peers"
        return "" if all(self._elastic(share.device) for share in granted.shares) else "accelerator"

    # --- orders ------------------------------------------------------------------------------------

    def suspend(self, entry: Entry) -> None:
        if entry.lease is None or not self.is_running(entry):
            return
        self._reports.order(entry.lease, suspend=True)
        now = self._clock.monotonic()
        self._orders[entry.number] = _Order(entry.task.attempt, True, now)

    def resume(self, entry: Entry) -> None:
        """Let a suspended task go on, if its memory is free."""
        if self.go_on(entry):
            self._admitting.holds_now(entry.id, entry.shares)

    def go_on(self, entry: Entry) -> bool:
        """Book a suspended task's memory and let it go on. Return False if that is not free."""
        if entry.task.state is not State.SUSPENDED or entry.number in self._orders:
            return False
        if entry.lease is None or not self._table.take_back(entry.lease):
            return False
        self._reports.order(entry.lease, suspend=False)
        now = self._clock.monotonic()
        self._orders[entry.number] = _Order(entry.task.attempt, False, now)
        return True

    def is_ordered(self, entry: Entry) -> bool:
        """Return whether a task is on the way to be suspended or to go on."""
        return entry.number in self._orders

    # --- what becomes of them ----------------------------------------------------------------------

    def look(self) -> bool:
        """Take in what workers have reported. Return whether devices have become free."""
        changed = False
        for number in self._orders.keys() - self._index.active:
            del self._orders[number]
        self._refused = {n: r for n, r in self._refused.items() if n in self._index.active}
        self._told = {n: lease for n, lease in self._told.items() if n in self._index.active}
        for number in sorted(self._index.active):
            entry = self._index.tasks[number]
            granted = self._lease_of(entry)
            if granted is None:
                self._orders.pop(number, None)
                if entry.task.state is State.SUSPENDED:  # its program has given its devices back
                    self._lifecycle.feed(entry, states.Resumed(entry.task.attempt))
                continue
            self._tell(entry, granted)
            order = self._orders.get(number)
            if order is not None and self._settle(entry, granted, order):
                del self._orders[number]
                changed = True
        return changed

    def _tell(self, entry: Entry, granted: Granted) -> None:
        """Order what an earlier head may have left undone: once for each lease."""
        if self._told.get(entry.number) == granted.lease:
            return
        if any(not self._reachable(share.device) for share in granted.shares):
            return
        self._told[entry.number] = granted.lease
        self._reports.order(granted.lease, suspend=entry.task.state is State.SUSPENDED)

    def _reachable(self, number: int) -> bool:
        node = self._nodes.of_device(number)
        return node is not None and node.channel is not None

    def _settle(self, entry: Entry, granted: Granted, order: _Order) -> bool:
        """Return whether an order was obeyed or refused."""
        profiles = [self._reports.of(share, granted.epoch) for share in granted.shares]
        found = {profile.state for profile in profiles if profile is not None}
        attempt = entry.task.attempt
        if order.attempt != attempt:
            return True
        if not order.suspend:
            if found != {"running"}:
                return False
            self._lifecycle.feed(entry, states.Resumed(attempt))
            self._lifecycle.pause(entry)
            return True
        if found == {"suspended"}:
            self._table.set_aside(granted.lease)
            self._lifecycle.feed(entry, states.Suspended(attempt))
            self._lifecycle.pause(entry)
            if self.line_up is not None:
                self.line_up(entry)
            else:
                self._admitting.holds_now(entry.id, {})
            return True
        reason = next((p.reason for p in profiles if p is not None and p.state == "refused"), "")
        if not reason and self._clock.monotonic() - order.since < limits.SUSPEND_S:
            return False
        self._refused[entry.number] = attempt, reason or "late"
        self._reports.order(granted.lease, suspend=False)
        return True
