"""What clients ask about tasks: submit, list, change, wait, logs and results."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

import msgspec

from shoal.pool.base import limits
from shoal.pool.base.clock import Clock
from shoal.pool.head.leases import LeaseTable
from shoal.pool.head.requests import Changed, Handler, Route, Routes
from shoal.pool.head.session_ends import Client
from shoal.pool.head.store import Pending, Store, StoreError
from shoal.pool.head.tasks import views
from shoal.pool.head.tasks.lifecycle import TaskLifecycle
from shoal.pool.head.tasks.plans import TaskPlans
from shoal.pool.head.tasks.rows import Entry
from shoal.pool.head.tasks.runners import Runner
from shoal.pool.head.tasks.travel_requests import TravelRequests
from shoal.pool.wire import admission_messages, messages, runner_messages, task_messages
from shoal.pool.wire.roles import Principal, Role
from shoal.pool.wire.task_messages import TaskInfo
from shoal.tasks import spec as specs
from shoal.tasks import states
from shoal.tasks.reasons import Code, Reason
from shoal.tasks.spec import SpecError
from shoal.tasks.states import FINAL, State


class Refused(Exception):
    """A request about a task that cannot be met. `code` is for programs."""

    def __init__(self, code: str, text: str, unblock: list[str] | None = None) -> None:
        super().__init__(text)
        self.answer = messages.refusal(text, code, unblock or [])


def _refusing(handler: Handler) -> Handler:
    """Return the handler with `Refused` as an answer."""

    async def answer(client: Client, ask: msgspec.Struct) -> messages.FromHead | None:
        try:
            return await handler(client, ask)
        except Refused as refused:
            return refused.answer

    return answer


class TaskRequests:
    def __init__(
        self,
        lifecycle: TaskLifecycle,
        plans: TaskPlans,
        store: Store,
        table: LeaseTable,
        clock: Clock,
    ) -> None:
        self._lifecycle = lifecycle
        self._index = lifecycle.index
        self._plans = plans
        self._store = store
        self._table = table
        self._clock = clock
        self._travel = TravelRequests(lifecycle)

    def routes(self) -> Routes:
        handlers: dict[type[msgspec.Struct], Handler] = {
            task_messages.SubmitTasks: self._submit,
            task_messages.AskTasks: self._list,
            task_messages.ChangeTask: self._change,
            task_messages.WaitTask: self._wait,
            task_messages.ReadLog: self._read_log,
            task_messages.AskFiles: self._of_runner,
            task_messages.ReadFile: self._of_runner,
            admission_messages.AskDryRun: self._dry_run,
        }
        found = {kind: Route(Role.USER, _refusing(one)) for kind, one in handlers.items()}
        return {**found, **self._travel.routes()}

    # --- submitting --------------------------------------------------------------------------------

    async def _submit(
        self, client: Client, ask: task_messages.SubmitTasks
    ) -> task_messages.TaskPage | messages.Refusal:
        """Accept all tasks of a message or none. The answer leaves when they are on the disk."""
        who = client.principal
        added: list[tuple[Entry, Pending]] = []
        found: list[Entry] = []
        try:
            for one in ask.tasks:
                known = self._known(who, one)
                if known is None:
                    entry, pending = self._add(who, one)
                    added.append((entry, pending))
                    known = entry
                found.append(known)
            await self._store.flushed(*(pending for _, pending in added))
        except (Refused, StoreError) as error:
            for entry, _ in added:
                self._lifecycle.drop(entry)
            self._lifecycle.rows.remove(entry.number for entry, _ in added)
            if isinstance(error, Refused):
                raise
            return messages.refusal(str(error), "disk")
        for entry, _ in added:
            self._lifecycle.accepted(entry)
        if added:  # its real reasons at once, unless many submit
            self._plans.catch_up(limits.SUBMIT_LOOK_S)
        if any(not entry.on_disk for entry in found):  # another connection's, and just refused
            return messages.refusal("the same key was submitted at this moment; try again", "again")
        return self._page(who, found)

    def _known(self, who: Principal, one: task_messages.Submission) -> Entry | None:
        """Return the task that has this key. Refuse another request with it."""
        number = self._index.keys.get((who.owner, one.key))
        if number is not None:
            known: Entry | None = self._index.tasks[number]
        else:
            known = self._lifecycle.rows.by_key(who.owner, one.key)
        if known is not None and known.request != specs.request_hash(one.spec):
            raise Refused(
                "key-conflict",
                f"the key {one.key} belongs to {known.id}, which was another request",
                ["another --key", f"the same request as that of {known.id}"],
            )
        return known

    async def _dry_run(
        self, client: Client, ask: admission_messages.AskDryRun
    ) -> admission_messages.WhyAnswer:
        """Check a task as if it were submitted, and say whether it would wait."""
        who = client.principal
        make = self._entry_maker(who, task_messages.Submission("dry-run", ask.spec))
        entry = make(0)
        entry.travels = self._lifecycle.elsewhere.may(entry.owner)
        return admission_messages.WhyAnswer(
            entry.name, entry.task.state.value, await self._plans.dry_run(entry)
        )

    def _add(self, who: Principal, one: task_messages.Submission) -> tuple[Entry, Pending]:
        return self._lifecycle.add(self._entry_maker(who, one), one.spec)

    def _entry_maker(
        self, who: Principal, one: task_messages.Submission
    ) -> Callable[[int], Entry]:  # fmt: skip
        """Check a submission. Return what makes its entry of a number."""
        spec = one.spec
        try:
            specs.check(spec)
            specs.check_key(one.key)
        except SpecError as error:
            raise Refused("bad-request", str(error)) from None
        if spec.priority == "high" and not who.may(Role.ADMIN):
            raise Refused("priority", "only an admin gives --priority high", ["--priority normal"])
        if len(self._index.tasks) >= limits.UNFINISHED_TASKS_MAX:
            raise Refused(
                "too-many",
                f"the pool has {limits.UNFINISHED_TASKS_MAX} tasks that have not ended, its limit",
                ["shoal cancel"],
            )
        after = frozenset(self._find(who, text).number for text in spec.after)
        name = spec.name or specs.default_name(spec.program)
        now = self._clock.now()

        def make(number: int) -> Entry:
            task = states.Task(
                number, State.HELD if spec.held else State.WAITING, now, spec.retries,
                spec.retry_exits, spec.until_at, after,
            )  # fmt: skip
            return Entry(
                task, one.key, who.owner, specs.task_id(name, number), name, spec.needs,
                specs.request_hash(spec), spec.priority, spec.grace_s, spec.limit_s,
                spec.machine, "" if spec.snapshot else spec.folder, tuple(spec.keep),
                self._travel.travels(who, spec.snapshot),
                steps=spec.steps, deadline_at=spec.deadline_at, yields=spec.yields,
            )  # fmt: skip

        return make

    # --- looking -----------------------------------------------------------------------------------

    async def _list(self, client: Client, ask: task_messages.AskTasks) -> task_messages.TaskPage:
        who = client.principal
        if ask.ids is not None:
            return self._page(who, [self._find(who, text, own=False) for text in ask.ids])
        if ask.ended:
            await self._store.flushed()
            found = self._lifecycle.rows.page(ask.first, limits.TASKS_PER_PAGE + 1)
            found = [self._index.tasks.get(e.number, e) for e in found]
        else:
            numbers = self._numbers_from(ask.first)
            found = [self._index.tasks[n] for n in numbers]
        page, more = found[: limits.TASKS_PER_PAGE], found[limits.TASKS_PER_PAGE :]
        following = more[0].number if more else None
        return task_messages.TaskPage(self._infos(who, page), following)

    def _numbers_from(self, first: int) -> list[int]:
        """Return the numbers of a page of unfinished tasks, and of the first one after it."""
        numbers = (
            n
            for group in (self._index.waiting, self._index.active)
            for n in group
            if n >= first and self._index.tasks[n].on_disk
        )
        return heapq.nsmallest(limits.TASKS_PER_PAGE + 1, numbers)

    def _page(self, who: Principal, entries: list[Entry]) -> task_messages.TaskPage:
        return task_messages.TaskPage(self._infos(who, entries))

    def _infos(self, who: Principal, entries: list[Entry]) -> list[TaskInfo]:
        plans = self._plans
        return [
            views.info(e, who, self._table, plans.reasons, plans.position) for e in entries
        ]  # fmt: skip

    def state_of(self, who: Principal, text: str) -> tuple[str, str, list[Reason]] | None:
        """Return request, state and reasons of the task that a member means; None: there is none."""
        self._plans.catch_up()
        try:
            entry = self._find(who, text, own=False)
        except Refused:
            return None
        reasons = [] if entry.task.state in FINAL else self._plans.reasons(entry)
        return (
            entry.id,
            entry.task.state.value,
            [Reason(Code(r.code), r.text, r.numbers) for r in reasons],
        )

    def _find(self, who: Principal, text: str, *, own: bool = True) -> Entry:
        """Return the task of an id, a key, or a name of the asker's own newest task."""
        entry = self._by_id(text) or self._by_key(who, text)
        if entry is None:
            newest = self._lifecycle.rows.newest_named(who.owner, text)
            entry = self._by_number(newest) if newest is not None else None
        if entry is None:
            raise Refused(
                "no-such-task", f"there is no task {text!r}", ["shoal queue --all lists them"]
            )
        if own and not views.may_see(entry, who):
            raise Refused("not-yours", f"{entry.id} belongs to {entry.owner}")
        return entry

    def _by_id(self, text: str) -> Entry | None:
        number = specs.number_of(text)
        entry = self._by_number(number) if number is not None else None
        return entry if entry is not None and text in (entry.id, str(number)) else None

    def _by_number(self, number: int) -> Entry | None:
        return self._index.tasks.get(number) or self._lifecycle.rows.by_number(number)

    def _by_key(self, who: Principal, key: str) -> Entry | None:
        number = self._index.keys.get((who.owner, key))
        if number is not None:
            return self._index.tasks[number]
        return self._lifecycle.rows.by_key(who.owner, key)

    # --- changing and waiting ----------------------------------------------------------------------

    async def _change(
        self, client: Client, ask: task_messages.ChangeTask
    ) -> task_messages.TaskPage | messages.Refusal:
        who = client.principal
        entry = self._find(who, ask.id)
        if ask.match not in ("", self._page(who, [entry]).tasks[0].version):
            raise Changed(entry.id)
        event: states.Event
        match ask.action:
            case "cancel":
                event = states.Cancel(who.owner)
            case "hold":
                event = states.Hold()
            case "release":
                event = states.Release()
        try:
            if entry.task.state in FINAL:
                states.step(entry.task, event, self._clock.now())  # refuses what makes no sense
            else:
                self._lifecycle.feed(entry, event)
        except states.NotNow as error:
            return messages.refusal(f"{entry.id} cannot be changed: {error}", "not-now")
        await self._store.flushed()
        return self._page(who, [entry])

    async def _wait(self, client: Client, ask: task_messages.WaitTask) -> task_messages.TaskPage:
        """Answer when a task has ended, or after a while."""
        who = client.principal
        entry = self._find(who, ask.id)
        if entry.number in self._index.tasks:
            event = self._lifecycle.ended.setdefault(entry.number, asyncio.Event())
            try:
                async with asyncio.timeout(min(ask.timeout_s, limits.TASK_WAIT_S)):
                    await event.wait()
            except TimeoutError:
                pass
        return self._page(who, [entry])

    # --- what runners have -------------------------------------------------------------------------

    async def _read_log(
        self, client: Client, ask: task_messages.ReadLog
    ) -> task_messages.LogPart | messages.Refusal:
        entry = self._find(client.principal, ask.id)
        task = entry.task
        attempt = task.attempt if ask.attempt is None else ask.attempt
        if attempt > task.attempt:
            return messages.refusal(
                f"{entry.id} has had {task.attempt} attempt(s), not {attempt}", "no-such-attempt"
            )
        if attempt == 0:  # it has not started: nothing yet, or nothing ever
            return task_messages.LogPart(0, ask.position, b"", task.state in FINAL)
        found = await self._ask(entry, attempt, ask)
        if not isinstance(found, task_messages.LogPart):
            if task.state in states.ACTIVE and attempt == task.attempt:
                return task_messages.LogPart(attempt, ask.position, b"", False)
            return found if isinstance(found, messages.Refusal) else _away(entry)
        return found

    async def _of_runner(
        self, client: Client, ask: task_messages.AskFiles | task_messages.ReadFile
    ) -> task_messages.FileList | task_messages.FilePart | messages.Refusal:
        entry = self._find(client.principal, ask.id)
        found = await self._ask(entry, entry.task.attempt, ask)
        if isinstance(found, task_messages.FileList | task_messages.FilePart | messages.Refusal):
            return found
        return _away(entry)

    async def _ask(
        self,
        entry: Entry,
        attempt: int,
        ask: task_messages.ReadLog | task_messages.AskFiles | task_messages.ReadFile,
    ) -> object:
        runner = self._runner_with_files(entry)
        if runner is None:
            return None
        answer = await self._lifecycle.runners.ask(
            runner,
            lambda number: runner_messages.AskRunner(
                number, entry.number, attempt, list(entry.keep), entry.folder, ask
            ),
        )
        return answer.answer if answer is not None else None

    def _runner_with_files(self, entry: Entry) -> Runner | None:
        known = self._lifecycle.runners.known
        return known.get(entry.task.runner or entry.last_runner)


def _away(entry: Entry) -> messages.Refusal:
    return messages.refusal(
        f"the runner with the log and files of {entry.id} is not connected", "no-runner",
        ["shoal runner on its machine, or shoal up there"],
    )  # fmt: skip
