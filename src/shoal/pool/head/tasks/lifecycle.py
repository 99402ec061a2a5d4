"""The tasks of a pool, at its head: feeds their state machines, and carries out what these say.

What a runner or a client hears is on the disk before: every change is queued at the store, and its
messages leave after the commit that contains it. A waiting task is an entry here and a row there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

from shoal.pool.base import limits
from shoal.pool.base.clock import Clock, Randomness
from shoal.pool.head.leases import Granted, LeaseTable, Request
from shoal.pool.head.store import Pending, Store
from shoal.pool.head.tasks.elsewhere import Elsewhere
from shoal.pool.head.tasks.index import TaskIndex
from shoal.pool.head.tasks.outbox import Outbox
from shoal.pool.head.tasks.rows import Entry, TaskStore
from shoal.pool.head.tasks.runners import SANDBOX, Runner, Runners
from shoal.pool.head.tasks.tickets import (
    NotPlanned,
    hash_ticket,
    may_lease,
    planned_request,
    reservation,
)
from shoal.pool.wire import messages, runner_messages
from shoal.pool.wire.roles import Principal
from shoal.tasks import states
from shoal.tasks.spec import TaskSpec
from shoal.tasks.states import ACTIVE, FINAL, State, Step, Stopping


class TaskLifecycle:
    """Args:
    wake: called when tasks or runners have changed, so that waiting ones should be looked at.
    end_lease: ends the lease of an attempt that has ended.
    """

    def __init__(
        self,
        store: Store,
        table: LeaseTable,
        clock: Clock,
        randomness: Randomness,
        wake: Callable[[], None],
        end_lease: Callable[[int], None],
        elsewhere: Elsewhere,
    ) -> None:
        self.elsewhere = elsewhere
        self.rows = TaskStore(store)
        self.index = TaskIndex()
        self.outbox = Outbox(store)
        self.counts = {"tasks_submitted": 0, "tasks_ended": 0, "attempts_lost": 0}
        self.runners = Runners(clock, self._runner_hello, self._runner_says, self._runner_gone)
        self.ended: dict[int, asyncio.Event] = {}  # tasks that a client waits for
        self._store = store
        self._table = table
        self._clock = clock
        self._random = randomness
        self._wake = wake
        self._end_lease = end_lease
        self._number = self.rows.last_number()
        self._tickets: dict[str, int] = {}  # hash -> task
        self._leases: dict[int, int] = {}  # lease -> task
        self._planned_at: dict[int, float] = {}  # task in state starting -> monotonic
        self._remove_at = 0.0  # monotonic
        self._restore()

    def _restore(self) -> None:
        """Take over the tasks of an earlier head. Their runners come back and report."""
        now = self._clock.monotonic()
        for entry in self.rows.unfinished():
            self.index.add(entry)
            if entry.task.state in ACTIVE:
                self.runners.expect(entry.task.runner, entry.owner)
                self._planned_at[entry.number] = now
                if entry.ticket:
                    self._tickets[entry.ticket] = entry.number
                if entry.lease is not None and entry.lease in self._table.leases:
                    self._leases[entry.lease] = entry.number
                    if entry.task.state is State.SUSPENDED:
                        self._table.set_aside(entry.lease)
                else:
                    entry.lease = None
        for entry in list(self.index.tasks.values()):
            for number in entry.task.after:
                earlier = self.index.tasks.get(number) or self.rows.by_number(number)
                if earlier is None or earlier.task.state in FINAL:
                    self._follow(entry, number, earlier)

    # --- submission --------------------------------------------------------------------------------

    def add(self, make: Callable[[int], Entry], spec: TaskSpec) -> tuple[Entry, Pending]:
        """Add a task. It counts once the store has it; `drop` it if that fails."""
        self._number += 1
        entry = make(self._number)
        entry.on_disk = False
        self.index.add(entry)
        return entry, self.rows.add(entry, spec)

    def accepted(self, entry: Entry) -> None:
        """Note that a submission is on the disk."""
        entry.on_disk = True
        self.index.touched.add(entry.number)
        self.counts["tasks_submitted"] += 1
        if _too_late(entry.task, self._clock.now()):
            self.feed(entry, states.UntilPassed())
        for number in entry.task.after:
            earlier = self.index.tasks.get(number)
            if earlier is None or earlier.task.state in FINAL:
                self._follow(entry, number, earlier or self.rows.by_number(number))
        self._wake()

    def drop(self, entry: Entry) -> None:
        """Forget a submission that could not be written."""
        self.index.remove(entry)

    def _follow(self, entry: Entry, number: int, earlier: Entry | None) -> None:
        state = earlier.task.state if earlier is not None else State.LOST
        name = earlier.id if earlier is not None else f"task {number}"
        self.feed(entry, states.EarlierEnded(number, name, state))

    # --- events ------------------------------------------------------------------------------------

    def feed(self, entry: Entry, event: states.Event, *, promise: bool = False) -> Pending | None:
        """Feed an event to a task, queue its new row, and whatever follows the commit."""
        before = entry.task
        outcome = states.step(before, event, self._clock.now())
        if outcome.task == before and not outcome.steps:
            return None
        entry.task = outcome.task
        self.index.sort(entry)
        if Step.FREE in outcome.steps:
            self._free(entry)
            if isinstance(event, states.AttemptLost):
                self.counts["attempts_lost"] += 1
        if outcome.task.state is not State.STARTING:
            self._planned_at.pop(entry.number, None)
        pending = self.rows.change(entry, promise=promise)
        for one in outcome.steps:
            if one is Step.STOP:
                self.outbox.after_commit(partial(self._send_stop, entry, entry.task.attempt))
            elif one is Step.END:
                self._end(entry)
        if entry.task.state in (State.WAITING, State.HELD, *FINAL):
            self._wake()
        return pending

    def _end(self, entry: Entry) -> None:
        """Tell those who wait for a task's end."""
        self.counts["tasks_ended"] += 1
        self.outbox.after_commit(lambda: self._settle(entry))
        for number in sorted(self.index.followers.pop(entry.number, ())):
            follower = self.index.tasks.get(number)
            if follower is not None and follower.on_disk:
                self.feed(
                    follower, states.EarlierEnded(entry.number, entry.id, entry.task.state)
                )  # fmt: skip

    def _settle(self, entry: Entry) -> None:
        """Forget a task whose end is on the disk."""
        if self._store.unwritten:  # the disk is full: people still ask
            self.outbox.after_commit(lambda: self._settle(entry))
            return
        self.index.remove(entry)
        waits = self.ended.pop(entry.number, None)
        if waits is not None:
            waits.set()

    def _free(self, entry: Entry) -> None:
        """Give back the devices of an attempt that has ended."""
        self._table.unreserve(reservation(entry.number))
        self._tickets.pop(entry.ticket, None)
        lease, entry.lease, entry.ticket, entry.shares = entry.lease, None, "", {}
        if lease is not None:
            self._leases.pop(lease, None)
            self._end_lease(lease)

    # --- plans -------------------------------------------------------------------------------------

    def start(self, entry: Entry, runner: Runner, shares: dict[int, int]) -> bool:
        """Reserve devices for a waiting task and start it. Return False if they are not free."""
        if not entry.task.ready or _too_late(entry.task, self._clock.now()):
            return False
        if not self._table.reserve(reservation(entry.number), shares):
            return False
        entry.shares, entry.last_runner = dict(shares), runner.name
        ticket = self._new_ticket(entry)
        self._planned_at[entry.number] = self._clock.monotonic()
        pending = self.feed(entry, states.Planned(runner.name), promise=True)
        assert pending is not None
        attempt = entry.task.attempt
        self.outbox.after_commit(lambda: self._send_start(entry, attempt, ticket, pending))
        return True

    def _start_again(self, entry: Entry) -> None:
        """Send the current attempt to its runner, which has never heard of it."""
        self._tickets.pop(entry.ticket, None)
        ticket = self._new_ticket(entry)
        self._planned_at[entry.number] = self._clock.monotonic()
        pending = self.rows.change(entry, promise=True)
        attempt = entry.task.attempt
        self.outbox.after_commit(lambda: self._send_start(entry, attempt, ticket, pending))

    def _new_ticket(self, entry: Entry) -> str:
        ticket = self._random.token(24)
        entry.ticket = hash_ticket(ticket)
        self._tickets[entry.ticket] = entry.number
        return ticket

    def _send_start(self, entry: Entry, attempt: int, ticket: str, written: Pending) -> None:
        task = entry.task
        if task.state is not State.STARTING or task.attempt != attempt:
            return
        runner = self.runners.known.get(task.runner)
        spec = self.rows.spec(entry.number) if not written.error else None
        if spec is None or runner is None or runner.channel is None:
            self.feed(entry, states.NotSent(attempt))
            return
        shown = None
        if runner.sandbox:
            shown = self.elsewhere.make_pass(entry)
            if shown is None or not self.elsewhere.can(entry):
                self.feed(entry, states.NotSent(attempt))
                return
        runner.attempts += 1
        runner.send(
            runner_messages.StartAttempt(
                entry.number, attempt, entry.id, entry.owner, spec, ticket, shown
            )
        )

    def _send_stop(self, entry: Entry, attempt: int) -> None:
        runner = self.runners.known.get(entry.task.runner)
        if entry.task.attempt == attempt and entry.task.state in ACTIVE and runner is not None:
            runner.send(runner_messages.StopAttempt(entry.number, attempt, entry.grace_s))

    def pause(self, entry: Entry) -> None:
        """Tell the runner whether the limit of an attempt counts: not while it is suspended."""
        runner, task = self.runners.known.get(entry.task.runner), entry.task
        if runner is not None:
            paused = task.state is State.SUSPENDED
            runner.send(runner_messages.PauseAttempt(entry.number, task.attempt, paused))

    # --- what runners say --------------------------------------------------------------------------

    def _runner_hello(self, runner: Runner, held: list[runner_messages.HeldAttempt]) -> None:
        """Compare what a runner has with what the head knows."""
        there = {(h.task, h.attempt): h for h in held}
        for entry in [self.index.tasks[n] for n in self.index.active]:
            task = entry.task
            if task.runner != runner.name:
                continue
            mine = there.pop((entry.number, task.attempt), None)
            if mine is not None:
                if mine.started:
                    self.feed(entry, states.Started(task.attempt))
                if task.stopping is not Stopping.NO:
                    self._send_stop(entry, task.attempt)
                if task.state is State.SUSPENDED:
                    self.pause(entry)
            elif task.state is not State.STARTING:
                self.feed(entry, states.AttemptLost(task.attempt, "its runner ended"))
            elif task.stopping is not Stopping.NO:
                self.feed(entry, states.NotSent(task.attempt))
            else:
                self._start_again(entry)
        for number, attempt in there:  # late: the task has another attempt, or has ended
            runner.send(runner_messages.StopAttempt(number, attempt, 0.0))
        self._wake()

    def _runner_says(self, runner: Runner, message: runner_messages.OfAttempt) -> None:
        entry = self.index.tasks.get(message.task)
        mine = entry is not None and entry.task.runner == runner.name
        if isinstance(message, runner_messages.ReadSubmitted):
            runner.send(self.elsewhere.submitted(entry, runner.name, message))
            if mine and message.task in self._planned_at:  # it is on the way
                self._planned_at[message.task] = self._clock.monotonic()
            return
        if isinstance(message, runner_messages.AttemptStarted):
            if entry is not None and mine:
                self.feed(entry, states.Started(message.attempt))
            return
        if entry is not None and mine:
            event: states.Event
            if message.lost:
                event = states.AttemptLost(message.attempt, message.lost)
            else:
                event = states.Exited(
                    message.attempt, message.code, message.over_limit, message.problem, message.over
                )
            self.feed(entry, event)
        self.outbox.after_commit(lambda: self._note_end(runner, message.task, message.attempt))

    def _note_end(self, runner: Runner, number: int, attempt: int) -> None:
        if self._store.unwritten:
            self.outbox.after_commit(lambda: self._note_end(runner, number, attempt))
            return
        now = self.runners.known.get(runner.name)
        if now is not None:
            now.send(runner_messages.EndNoted(number, attempt))

    def _runner_gone(self, runner: Runner) -> None:
        self._wake()

    # --- leases ------------------------------------------------------------------------------------

    def request_of(self, ticket: str, who: Principal, ask: messages.AskLease) -> Request:
        """Return the request that was planned for the task whose program shows this ticket."""
        entry = self._of_ticket(ticket)
        if entry is None or entry.owner != who.owner or not may_lease(entry, who):
            raise NotPlanned("the task of this program has ended, or has started again elsewhere.")
        if entry.lease is not None and entry.lease in self._table.leases:
            raise NotPlanned(f"another process of {entry.id} has its devices.")
        return planned_request(entry, who, ask)

    def leased(self, ticket: str, granted: Granted) -> None:
        """Note that the program of a task has its lease, which now holds what was reserved."""
        entry = self._of_ticket(ticket)
        if entry is None:
            return
        entry.lease = granted.lease
        self._leases[granted.lease] = entry.number
        self._table.unreserve(reservation(entry.number))
        self.rows.change(entry, promise=False)

    def not_leased(self, ticket: str) -> None:
        """Note that planned devices were gone when the program asked for them."""
        entry = self._of_ticket(ticket)
        if entry is not None:
            self.feed(entry, states.DeviceLost(entry.task.attempt))

    def revoke(self, owner: str) -> None:
        """End what runs on other machines for somebody who is no member any more."""
        for number in list(self.index.active):
            entry = self.index.tasks[number]
            if entry.owner == owner and entry.task.runner.startswith(SANDBOX):
                self.feed(entry, states.Cancel(owner))
        self.index.touched |= self.index.waiting
        self._wake()

    def lease_lost(self, lease: int) -> None:
        """Note that the pool has lost a device of a lease."""
        entry = self._of_lease(lease)
        if entry is not None:
            self.feed(entry, states.DeviceLost(entry.task.attempt))

    def lease_ended(self, lease: int) -> None:
        """Reserve the devices of a lease again: its task runs, and may connect once more."""
        entry = self._of_lease(lease)
        if entry is not None:
            del self._leases[lease]
            entry.lease = None
            self.reserve_again()

    def reserve_again(self) -> None:
        """Reserve what attempts without a lease were promised, on devices that are there."""
        for entry in self._without_lease():
            there = {d: b for d, b in entry.shares.items() if d in self._table.devices}
            self._table.reserve(reservation(entry.number), there)

    def _without_lease(self) -> Iterator[Entry]:
        for number in self.index.active:
            entry = self.index.tasks[number]
            if entry.lease is None and entry.shares:
                yield entry

    def _of_ticket(self, ticket: str) -> Entry | None:
        number = self._tickets.get(hash_ticket(ticket))
        entry = self.index.tasks.get(number) if number is not None else None
        return entry if entry is not None and entry.task.state in ACTIVE else None

    def _of_lease(self, lease: int) -> Entry | None:
        number = self._leases.get(lease)
        return self.index.tasks.get(number) if number is not None else None

    # --- time --------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Note what has taken too long. The head calls this four times a second."""
        monotonic, now = self._clock.monotonic(), self._clock.now()
        for runner in self.runners.gone():
            for entry in [self.index.tasks[n] for n in self.index.active]:
                if entry.task.runner == runner.name:
                    self.feed(entry, states.AttemptLost(entry.task.attempt, "its runner ended"))
            self.runners.forget(runner)
        for number, planned in list(self._planned_at.items()):
            late = self.index.tasks.get(number)
            if late is not None and monotonic - planned > limits.ATTEMPT_START_S:
                self._planned_at[number] = monotonic
                self.feed(late, states.Late(late.task.attempt))
        for number in list(self.index.with_until):
            entry = self.index.tasks[number]
            if entry.on_disk and _too_late(entry.task, now):
                self.feed(entry, states.UntilPassed())
        if monotonic >= self._remove_at:
            self._remove_at = monotonic + limits.TASKS_REMOVE_S
            self._remove_old()

    def _remove_old(self) -> None:
        """Remove tasks that ended long ago, with their logs."""
        old = self.rows.old(self._clock.now())
        self.elsewhere.files.remove_old()
        if old:
            self.rows.remove(old)
            for runner in self.runners.known.values():
                for number in old:
                    runner.send(runner_messages.ForgetTask(number))


def _too_late(task: states.Task, now: float) -> bool:
    """Return whether a task has not started by its --until."""
    return task.until_at is not None and task.until_at <= now and task.started_at is None
