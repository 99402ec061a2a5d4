"""Lets the planner decide for tasks, and carries out its plans: starts, suspensions, resumptions.

A plan is made when tasks or devices have changed, and once a minute. Without a planner that answers,
admission starts tasks by its rule, and suspended tasks go on when their devices are free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import msgspec

from shoal.pool.base import limits
from shoal.pool.base.clock import Clock
from shoal.pool.head.admitting import Admitting
from shoal.pool.head.leases import LeaseTable
from shoal.pool.head.nodes import Nodes
from shoal.pool.head.session_reports import SessionReports
from shoal.pool.head.store import Store
from shoal.pool.head.tasks.lifecycle import TaskLifecycle
from shoal.pool.head.tasks.observing import Observing
from shoal.pool.head.tasks.preempting import Preempting
from shoal.pool.head.tasks.rows import Entry
from shoal.pool.head.tasks.suspending import Suspending
from shoal.pool.planner import carrying_out, facts, learned
from shoal.pool.planner.carrying_out import Placed
from shoal.pool.planner.facts import Facts, LiveDevice, LiveTask
from shoal.pool.planner.rounds import Planner, Round
from shoal.schedule.formats.records import PlanFields
from shoal.tasks.reasons import Code, Reason
from shoal.tasks.room import is_of_kind
from shoal.tasks.states import State

_log = logging.getLogger(__name__)

_WEIGHTS = {"high": 4.0, "normal": 1.0, "low": 0.25}


class LivePlan:
    """Args:
    planner: None: the rule of admission is not the planner's.
    """

    def __init__(
        self,
        lifecycle: TaskLifecycle,
        admitting: Admitting,
        table: LeaseTable,
        nodes: Nodes,
        reports: SessionReports,
        planner: Planner | None,
        clock: Clock,
        store: Store,
    ) -> None:
        self.planner = planner
        self.last: Round | None = None
        self._lifecycle = lifecycle
        self._index = lifecycle.index
        self._admitting = admitting
        self._table = table
        self._clock = clock
        self.suspending = Suspending(lifecycle, admitting, table, nodes, reports, clock)
        self._preempting = Preempting(lifecycle, admitting, self.suspending)
        self.observing = Observing(lifecycle, table, nodes, reports)
        self._store = store
        self._saved = (b"", clock.monotonic())  # what is in the store, and since when
        self._woken = asyncio.Event()
        self._base: float | None = None  # Unix time where the views' clock begins
        self._unused: set[int] = set()
        self._decided = 0.0  # monotonic: when the last plan was carried out
        self._tried: set[int] = set()  # tasks that the last plan was to start
        self._restore()

    def wake(self) -> None:
        """Make a new plan soon: something has changed."""
        self._woken.set()

    def woken_by_report(self) -> None:
        """A session was suspended, or goes on."""
        if self.suspending.look():
            self.wake()

    async def run(self) -> None:
        """Plan and watch, for ever."""
        try:
            await asyncio.gather(self._watch(), self._plan())
        finally:
            if self.planner is not None:
                await self.planner.close()

    async def _watch(self) -> None:
        while True:
            if self.look():
                self.wake()
            if self.planner is not None and self._lifecycle.runners.known:
                await self.planner.ensure()
            if self._clock.monotonic() - self._saved[1] >= limits.LEARNED_SAVE_S:
                self.save()
            await asyncio.sleep(limits.WATCH_LOOK_S)

    def _restore(self) -> None:
        """Go on from what an earlier head has learned."""
        before = learned.decode(self._store.learned("planner"))
        self.observing.restore(before)
        if self.planner is not None and before.base is not None:
            self.planner.restore(before.policy)
            self._base = before.base  # the policy's times count from there

    def save(self) -> None:
        """Keep what was learned, if it is news."""
        policy = self.planner.memory if self.planner is not None else {}
        found = msgspec.structs.replace(self.observing.state(), policy=policy, base=self._base)
        document = learned.encode(found)
        if document != self._saved[0]:
            self._store.save_learned("planner", document)
        self._saved = document, self._clock.monotonic()

    def look(self) -> bool:
        """Look at what runs. Return whether that asks for a new plan."""
        learned = self.observing.look(self.suspending.is_running)
        now = self._clock.now()
        for entry in (self._index.tasks[number] for number in self._index.active):
            end = self.observing.ends_at(entry, now)
            if end is not None:
                self._admitting.expect(entry.id, end)
        unused = self._unused_devices()
        news, self._unused = unused - self._unused, unused
        return self.suspending.look() or learned or bool(news)

    async def _plan(self) -> None:
        while True:
            woken = True
            # A task that should have started, or could on a free device, tries again soon.
            failed = bool(self._tried & self._index.waiting)
            hopeful = failed or (self._index.waiting and self._has_free_device())
            try:
                async with asyncio.timeout(limits.ROUND_FULL_S if hopeful else limits.ROUND_S):
                    await self._woken.wait()
            except TimeoutError:
                woken = False
            now = self._clock.monotonic()
            early = self.planner is not None and now - self._decided < limits.ROUND_FULL_S
            if woken and early and not self._has_free_device():
                await asyncio.sleep(limits.ROUND_PAUSE_S)
                continue  # it is still woken
            self._woken.clear()
            await self.decide()
            spent_s = self._clock.monotonic() - now
            await asyncio.sleep(max(limits.ROUND_PAUSE_S, spent_s))

    def _has_free_device(self) -> bool:
        used = {d for place in self._placed().values() if place.running for d in place.devices}
        used |= self._pinned_devices()
        return any(d.present and n not in used for n, d in self._table.devices.items())

    # --- a round -----------------------------------------------------------------------------------

    async def decide(self) -> None:
        """Ask the planner once, and carry out what it says."""
        self._decided, self._tried = self._clock.monotonic(), set()
        waiting = list(self._waiting())
        if not waiting and all(place.running for place in self._placed().values()):
            answers = self.last is None or self.last.source == "planner"
            if self.planner is not None and self.planner.pid is not None and answers:
                self._admitting.leave_to_planner(self._clock.now() + limits.PLAN_STANDS_S)
            return
        if self.planner is None:
            if self._admitting.admission.rule.preempts:
                self._preempting.look(waiting, self._clock.now())
            return
        self.observing.look_at_devices()
        known = self._facts(waiting)
        if not any(known.devices):
            self._carry_out(known, PlanFields([]))
            return
        found = await self.planner.decide(known.view)
        self.last = found
        if found.source == "planner":
            self._carry_out(known, found.plan)
        else:
            self._admitting.leave_to_planner(0.0)
            self._go_on()

    def _go_on(self) -> None:
        """Without a plan, suspended tasks go on where nobody else runs."""
        for number in carrying_out.alone_again(self._placed()):
            self.suspending.resume(self._index.tasks[number])

    def _carry_out(self, known: Facts, plan: PlanFields) -> None:
        """Carry out a plan, as far as tasks and devices are still as they were."""
        pinned = self._pinned_devices()
        kinds = [[n for n in numbers if n not in pinned] for numbers in known.devices]
        placed = self._placed()
        there = self._index.tasks
        groups = [
            (kind, [t for t in tasks if t in placed or self._is_waiting(there.get(t))])
            for kind, tasks in plan.assignments
        ]
        gangs = {t: there[t].needs.devices for _, tasks in groups for t in tasks}
        found = carrying_out.orders([g for g in groups if g[1]], kinds, placed, gangs)
        until = self._clock.now() + limits.PLAN_STANDS_S
        for number in found.suspend:
            self.suspending.suspend(there[number])
        for number in found.resume:
            self.suspending.resume(there[number])
        # While the plan is carried out the rule starts nothing; then it fills what is left idle.
        self._admitting.leave_to_planner(until)
        self._tried = set(found.start)
        for number, devices in found.start.items():
            self._admitting.place(there[number].id, devices)
        used = {d for place in self._placed().values() for d in place.devices}
        idle = {n for numbers in kinds for n in numbers} - used - self._pinned_devices()
        idle |= self._unused_devices()
        self._admitting.leave_to_planner(until, idle, [there[number].id for number in found.later])
        self._admitting.leave_to_planner(until)  # who comes now is the next plan's

    # --- what the planner is asked -----------------------------------------------------------------

    def _is_waiting(self, entry: Entry | None) -> bool:
        return entry is not None and entry.task.state is State.WAITING

    def _waiting(self) -> Iterator[Entry]:
        """Yield the tasks that could start: the first in line."""
        admission, now, count = self._admitting.admission, self._clock.now(), 0
        by_id = {self._index.tasks[n].id: self._index.tasks[n] for n in self._index.waiting}
        for waiting in admission.in_turn(now):
            entry = by_id.get(waiting.ask.request)
            if entry is None or waiting.holds or waiting.not_before > now:
                continue
            yield entry
            count += 1
            if count == limits.PLANNED_TASKS_MAX:
                return

    def _placed(self) -> dict[int, Placed]:
        """Return the tasks that a plan may suspend or let go on."""
        found = {}
        for number in self._index.active:
            entry = self._index.tasks[number]
            running = self.suspending.is_running(entry)
            if running is not None:
                found[number] = Placed(tuple(sorted(entry.shares)), running)
        return found

    def _pinned_devices(self) -> set[int]:
        """Return the devices of tasks that no plan can move."""
        return {
            device
            for number in self._index.active
            if self.suspending.is_running(self._index.tasks[number]) is None
            for device in self._index.tasks[number].shares
        }

    def _unused_devices(self) -> set[int]:
        """Return the devices of programs that run and do not lease them: booking alone counts."""
        found: set[int] = set()
        used: set[int] = set()
        for entry in (self._index.tasks[number] for number in self._index.active):
            since = entry.task.attempt_at
            late = since is not None and self._clock.now() - since > limits.UNUSED_S
            idle = entry.lease is None and entry.task.state is State.RUNNING and late
            (found if idle else used).update(entry.shares)
        return found - used

    def _facts(self, waiting: list[Entry]) -> Facts:
        pinned = self._pinned_devices()
        taken_bytes: dict[int, int] = {}
        tasks_leases = {self._index.tasks[n].lease for n in self._index.active}
        for granted in self._table.leases.values():
            if granted.lease not in tasks_leases:
                for share in granted.shares:
                    before = taken_bytes.get(share.device, 0)
                    taken_bytes[share.device] = before + share.memory_bytes
        devices = [
            LiveDevice(
                number, profile.kind, self._table.devices[number].node,
                max(1, self._table.devices[number].memory_bytes - taken_bytes.get(number, 0)),
                profile, number not in pinned,
            )
            for number, profile in self.observing.profiles.items()
        ]  # fmt: skip
        if self._base is None:
            self._base = min(entry.task.submitted_at for entry in self._index.tasks.values())
        placed = self._placed()
        tasks = [self._live(self._index.tasks[number], devices) for number in placed]
        tasks += [self._live(entry, devices) for entry in waiting]
        quotas = {
            owner: max(0, quota.devices - self._of_programs(owner))
            for owner, quota in self._table.quotas.items()
            if quota.devices is not None
        }
        return facts.facts(
            self._clock.now() - self._base, devices, tasks, self.observing.knowledge, quotas,
            round_s=limits.ROUND_S,
        )  # fmt: skip

    def _of_programs(self, owner: str) -> int:
        """Return the devices that an owner holds by leases and pinned tasks: the view has no others."""
        placed = self._placed()
        in_view = {self._index.tasks[number].lease for number in placed}
        leases = self._table.owned_by(owner)
        count = sum(len(g.shares) for g in leases if g.lease not in in_view)
        for number in self._index.active - placed.keys():
            entry = self._index.tasks[number]
            if entry.owner == owner and entry.lease is None:
                count += len(entry.shares)
        return count

    def _live(self, entry: Entry, devices: list[LiveDevice]) -> LiveTask:
        task, observed = entry.task, self.observing
        kind = next((d.kind for d in devices if d.number in entry.shares), None)
        started = self.suspending.is_running(entry) is not None
        suits = {
            d.kind
            for d in devices
            if is_of_kind(self._table.devices[d.number].kind, entry.needs.kind)
        }
        running = started and self.suspending.is_running(entry)
        return LiveTask(
            entry.number, entry.id, entry.owner, max(0.0, task.submitted_at - (self._base or 0.0)),
            entry.needs.devices,
            frozenset([kind]) if started and kind is not None else frozenset(suits),
            _WEIGHTS[entry.priority],
            None if entry.deadline_at is None else max(1.0, entry.deadline_at - task.submitted_at),
            entry.needs.memory_bytes or 0,
            entry.limit_s,
            observed.type_of(entry),
            observed.steps_of(entry),
            observed.total_of(entry),
            kind if running else None,
            task.started_at is not None,
            observed.used_bytes(entry),
        )  # fmt: skip

    # --- what people see ---------------------------------------------------------------------------

    def reasons(self, entry: Entry) -> list[Reason]:
        """Return who makes room for a waiting task, and what runs and cannot be suspended for it."""
        refusals = sorted(self.suspending.refusals().items())[: limits.REASONS_SHOWN_MAX]
        texts = [f"{task} cannot be suspended: {why}" for task, why in refusals]
        if self.planner is None and not self._admitting.admission.rule.preempts:
            texts = []  # nothing is suspended for others anyway
        return [
            *self._preempting.reasons(entry),
            *(Reason(Code.CANNOT_SUSPEND, text) for text in texts),
        ]
