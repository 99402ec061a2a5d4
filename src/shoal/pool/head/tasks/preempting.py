"""Makes room for urgent tasks under a rule that preempts: suspends others, or asks them to yield."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.pool.head.admitting import Admitting
from shoal.pool.head.tasks.lifecycle import TaskLifecycle
from shoal.pool.head.tasks.rows import Entry
from shoal.pool.head.tasks.suspending import Suspending
from shoal.tasks import preemption, states
from shoal.tasks.preemption import Runs
from shoal.tasks.reasons import Code, Reason
from shoal.tasks.requests import Holding
from shoal.tasks.states import State, Stopping


class Preempting:
    def __init__(
        self, lifecycle: TaskLifecycle, admitting: Admitting, suspending: Suspending
    ) -> None:
        self._lifecycle = lifecycle
        self._index = lifecycle.index
        self._admitting = admitting
        self._suspending = suspending
        self._stops: dict[int, tuple[int, str]] = {}  # by task: the attempt, and for whom it stops

    def look(self, waiting: Iterable[Entry], now: float) -> None:
        """Stop what holds up tasks that wait, the first in line first."""
        self._forget()
        admission = self._admitting.admission
        by_id = {entry.id: entry for entry in self._running()}
        runs = [self._runs(by_id[n], h) for n, h in admission.holdings.items() if n in by_id]
        offers = dict(admission.offers)
        served = {request for _, request in self._stops.values()}
        for number in self._stops:  # their devices have somebody who takes them
            for device in self._index.tasks[number].shares:
                offers.pop(device, None)
        for entry in waiting:
            ask = admission.waiting[entry.id].ask
            if entry.id in served or admission.over_quota(ask) or admission.fits_now(ask, now):
                continue
            key = admission.waiting[entry.id].key
            for one in preemption.make_room(ask, key, offers, runs):
                self._stop(by_id[one.ask.request], entry.id)
                for device in one.shares_bytes:
                    offers.pop(device, None)

    def _running(self) -> Iterable[Entry]:
        for number in sorted(self._index.active):
            entry = self._index.tasks[number]
            if entry.task.state is State.RUNNING:
                yield entry

    def _runs(self, entry: Entry, holding: Holding) -> Runs:
        ask = holding.ask
        asked = ask.asked if ask.asked is not None else holding.since
        key = self._admitting.admission.rule.key(ask, asked)
        return Runs(ask, key, holding.shares_bytes, self._is_movable(entry))

    def _is_movable(self, entry: Entry) -> bool:
        if entry.number in self._stops or entry.task.stopping is not Stopping.NO:
            return False
        return bool(self._suspending.is_running(entry)) or entry.yields

    def _stop(self, entry: Entry, request: str) -> None:
        """Suspend a task in place; one that cannot be suspended yields."""
        if self._suspending.is_running(entry):
            self._suspending.suspend(entry)
        else:
            self._lifecycle.feed(entry, states.AskYield())
        self._stops[entry.number] = entry.task.attempt, request

    def _forget(self) -> None:
        """Forget what has stopped, what cannot, and for whom nothing needs to stop any more."""
        waiting = self._admitting.admission.waiting
        for number, (attempt, request) in list(self._stops.items()):
            entry = self._index.tasks.get(number)
            stops = (
                entry is not None
                and entry.task.attempt == attempt
                and entry.task.state is State.RUNNING
                and (self._suspending.is_ordered(entry) or entry.task.stopping is Stopping.YIELD)
            )
            if not stops or request not in waiting:
                del self._stops[number]

    def reasons(self, entry: Entry) -> list[Reason]:
        """Return who makes room for a waiting task."""
        names = [
            self._index.tasks[number].id
            for number, (_, request) in sorted(self._stops.items())
            if request == entry.id and number in self._index.tasks
        ]
        if not names:
            return []
        text = f"{', '.join(names)} of a lower priority makes room for it"
        return [Reason(Code.PREEMPTING, text, {"tasks": len(names)})]
