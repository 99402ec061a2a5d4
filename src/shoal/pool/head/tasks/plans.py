"""Which waiting task starts next, and where: asks whoever decides, and starts what may start."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from shoal.pool.base import limits
from shoal.pool.base.clock import Clock
from shoal.pool.head.admitting import Admitting
from shoal.pool.head.leases import LeaseTable
from shoal.pool.head.tasks.lifecycle import TaskLifecycle
from shoal.pool.head.tasks.live_plan import LivePlan
from shoal.pool.head.tasks.rows import Entry
from shoal.pool.head.tasks.runners import Runner
from shoal.pool.wire.task_messages import TaskReason
from shoal.tasks.reasons import Code, Reason, Why
from shoal.tasks.requests import Ask, Priority
from shoal.tasks.room import Needs
from shoal.tasks.states import ACTIVE, State

_PRIORITIES = {"high": Priority.HIGH, "normal": Priority.NORMAL, "low": Priority.LOW}
_HOLDS = (Code.HELD, Code.AFTER, Code.NO_RUNNER)


class TaskPlans:
    """Tasks wait in the same admission as leases. What admission admits is reserved, and started."""

    def __init__(
        self, lifecycle: TaskLifecycle, admitting: Admitting, table: LeaseTable, clock: Clock
    ) -> None:
        self._lifecycle = lifecycle
        self._index = lifecycle.index
        self._admitting = admitting
        self._table = table
        self._clock = clock
        self._woken = asyncio.Event()
        self._looked_at = 0.0  # monotonic
        self._again: set[int] = set()  # suspended tasks that wait for their devices in admission
        self._known: dict[int, str] = {}  # tasks in admission, by number: their requests
        self._positions: dict[str, int] = {}
        self._positions_at = 0.0  # monotonic
        self._moved = True  # since the positions were made
        self._runners: frozenset[tuple[str, str]] = frozenset()  # that can start something
        self.live: LivePlan | None = None

    def wake(self) -> None:
        """Look at the waiting tasks soon: something has changed."""
        self._moved = True
        self._woken.set()

    async def run(self) -> None:
        """Start what may start, for ever."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            self.look()
            await asyncio.sleep(limits.SCHEDULE_PAUSE_S)

    def catch_up(self, quiet_s: float = 0.0) -> None:
        """Look now, if something has changed and the last look is so long ago."""
        if self._woken.is_set() and self._clock.monotonic() - self._looked_at >= quiet_s:
            self.look()

    def look(self) -> None:
        """Show admission which tasks came, changed and ended. It starts what may start."""
        self._looked_at = self._clock.monotonic()
        self._lifecycle.reserve_again()
        able = frozenset(
            (r.owner, "" if r.sandbox else r.machine)
            for r in self._lifecycle.runners.known.values()
            if r.channel is not None
        )
        touched = self._index.take_touched()
        if able != self._runners:
            self._runners = able
            touched |= self._index.waiting
        for number in sorted(touched):
            self._update(number, self._index.tasks.get(number))
        self._admitting.changed()
        if self.live is not None:
            self.live.wake()

    def _update(self, number: int, entry: Entry | None) -> None:
        known = self._known.get(number)
        state = entry.task.state if entry is not None else None
        waits = state in (State.WAITING, State.HELD)
        if number in self._again:
            if state is State.SUSPENDED and known is not None and self._admitting.waits(known):
                return  # until it goes on
            self._again.discard(number)
            if known is not None and self._admitting.waits(known):
                self._admitting.withdraw(known)
                del self._known[number]
                known = None
        if known is not None and not self._admitting.waits(known):
            if entry is not None and state in ACTIVE:
                return  # it holds what it was admitted to
            self._admitting.ended(known)
            del self._known[number]
        elif known is not None and not waits:
            self._admitting.withdraw(known)
            del self._known[number]
        if entry is None or not entry.on_disk:
            return
        if waits:
            self._add_or_hold(entry)
        elif state in ACTIVE and number not in self._known:  # an earlier head started it
            self._known[number] = entry.id
            suspended = state is State.SUSPENDED
            self._admitting.adopt(self._ask(entry), {} if suspended else entry.shares)
            if suspended and self.live is not None and self.live.suspending.line_up is not None:
                self.line_up(entry)

    def _add_or_hold(self, entry: Entry) -> None:
        holds = {reason.code: reason for reason in self._holds(entry)}
        if entry.number not in self._known:
            self._known[entry.number] = entry.id
            self._admitting.add(
                self._ask(entry),
                lambda devices: self._start(entry, devices),
                lambda: None,
                tuple(holds.values()),
            )
            return
        before = self._admitting.admission.waiting[entry.id].holds
        for reason in holds.values():
            if before.get(reason.code) != reason:
                self._admitting.hold(entry.id, reason)
        for code in _HOLDS:
            if code in before and code not in holds and self._admitting.waits(entry.id):
                self._admitting.release(entry.id, code)

    def _start(self, entry: Entry, devices: tuple[int, ...]) -> dict[int, int] | None:
        """Reserve devices for a task that was admitted, and start it."""
        runner = self.runner_of(entry)
        if runner is None or not entry.task.ready or self._is_full(runner):
            return None
        needs, offers = self._ask(entry).needs, {o.number: o for o in self._table.offers()}
        if not all(number in offers for number in devices):
            return None
        shares = {number: offers[number].share_bytes(needs) for number in devices}
        if not all(shares.values()) or not self._lifecycle.start(entry, runner, shares):
            return None
        return shares

    def _is_full(self, runner: Runner) -> bool:
        """Return whether a runner has as many attempts as it can report, ended ones included."""
        tasks, most = self._index.tasks, limits.ATTEMPTS_PER_RUNNER_MAX // 2
        if len(self._index.active) < most:
            return False
        return sum(tasks[n].task.runner == runner.name for n in self._index.active) >= most

    def _ask(self, entry: Entry) -> Ask:
        needs = entry.needs
        return Ask(
            entry.id,
            entry.owner,
            # Without an amount it has its devices to itself, as far as tasks go.
            Needs(
                needs.devices, needs.memory_bytes, None, needs.kind,
                alone=needs.memory_bytes is None,
            ),
            _PRIORITIES[entry.priority],
            entry.limit_s,
            probably_s=self.live.observing.lasts_s(entry) if self.live is not None else None,
            asked=entry.task.submitted_at,
            by_plan=True,
        )  # fmt: skip

    def runner_of(self, entry: Entry) -> Runner | None:
        """Return a runner that can start this task: its owner's, else a node's that runs others'."""
        lifecycle = self._lifecycle
        return lifecycle.runners.of(entry, lifecycle.elsewhere.can(entry))

    # --- what people see ---------------------------------------------------------------------------

    def position(self, entry: Entry) -> int | None:
        """Return a waiting task's place in line; 1 is next. In a long line it may be a second old."""
        now = self._clock.monotonic()
        if self._moved and (
            len(self._positions) < limits.TASKS_PER_PAGE
            or now - self._positions_at > limits.POSITIONS_S
        ):
            self._positions, self._moved = self._admitting.positions(), False
            self._positions_at = now
        if entry.task.state is not State.WAITING:
            return None
        found = self._positions.get(entry.id)
        return len(self._positions) + 1 if found is None else found  # or it has just come

    def reasons(self, entry: Entry) -> list[TaskReason]:
        """Return why a task does not run; at least one while it is held, waits or is suspended."""
        task = entry.task
        if task.state is State.STARTING:
            return [TaskReason(Code.STARTING, f"its program starts at {task.runner}")]
        if task.state not in (State.WAITING, State.HELD, State.SUSPENDED):
            return []
        found = self._holds(entry) if task.state is not State.SUSPENDED else [self._aside(entry)]
        if self._admitting.waits(entry.id):
            reasons = self._admitting.reasons(entry.id, self.position(entry))
            found += [reason for reason in reasons if reason.code not in _HOLDS]
        if task.state is State.WAITING and self.live is not None:
            found += self.live.reasons(entry)
        return [
            TaskReason(reason.code, reason.text[: limits.TEXT_CHARS_MAX], reason.numbers)
            for reason in found
        ] or [TaskReason(Code.PLACING, "it takes its place in line at this moment")]

    async def dry_run(self, entry: Entry) -> Why:
        """Explain a task that was not submitted."""
        self.catch_up()
        return await self._admitting.dry_run(self._ask(entry), self._holds(entry))

    def _aside(self, entry: Entry) -> Reason:
        """Return why a task is suspended, and which tasks run in its place."""
        others = [self._index.tasks[number] for number in sorted(self._index.active)]
        run = (State.STARTING, State.RUNNING)
        names = [
            other.id
            for other in others
            if other.task.state in run and other.shares.keys() & entry.shares.keys()
        ]
        who = f"{', '.join(names[:8])} goes first" if names else "others go first"
        used_bytes = self.live.observing.used_bytes(entry) if self.live is not None else 0
        text = f"{who}; its memory is on the host, and it goes on later"
        return Reason(Code.SUSPENDED, text, {"tasks_ahead": len(names), "host_bytes": used_bytes})

    def line_up(self, entry: Entry) -> None:
        """Put a suspended task back in line for its own devices: the rule says when it goes on."""
        ask = self._ask(entry)
        needs = replace(ask.needs, only=frozenset(entry.shares))
        self._again.add(entry.number)
        self._admitting.line_up_again(
            replace(ask, needs=needs, by_plan=False), lambda _: self._go_on(entry)
        )

    def _go_on(self, entry: Entry) -> dict[int, int] | None:
        goes_on = self.live is not None and self.live.suspending.go_on(entry)
        return dict(entry.shares) if goes_on else None

    def _holds(self, entry: Entry) -> list[Reason]:
        """Return why a task takes no part in admission yet."""
        task, found = entry.task, []
        if task.state is State.HELD:
            text = f"its owner holds it; shoal release {entry.id} lets it go on"
            found.append(Reason(Code.HELD, text))
        if task.after:
            earlier = [self._index.tasks.get(number) for number in sorted(task.after)]
            names = ", ".join(e.id for e in earlier[:8] if e is not None) or "an earlier task"
            verb = "has" if len(task.after) == 1 else "have"
            text = f"{names} {verb} not succeeded yet"
            found.append(Reason(Code.AFTER, text, {"tasks": len(task.after)}))
        if self.runner_of(entry) is None:
            found.append(Reason(Code.NO_RUNNER, self._no_runner(entry)))
        return found

    def _no_runner(self, entry: Entry) -> str:
        elsewhere = self._lifecycle.elsewhere
        if elsewhere.can(entry):
            also = ", and no node runs programs of others (shoal node --tasks)"
        elif elsewhere.may(entry.owner):
            also = ". It runs there only: its files did not come with it (--snapshot)"
        else:
            also = ""
        return (
            f"no runner of {entry.owner} is connected on the machine of its submission{also}. There: "
            "shoal up, or on a client's machine: shoal runner"
        )
