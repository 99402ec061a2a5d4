"""What clients ask for tasks that run on other machines: where they could, and files by hash."""

from __future__ import annotations

from shoal.errors import PoolError
from shoal.pool.head.requests import Route, Routes
from shoal.pool.head.session_ends import Client
from shoal.pool.head.tasks.lifecycle import TaskLifecycle
from shoal.pool.wire import messages, task_messages
from shoal.pool.wire.roles import Principal, Role


class TravelRequests:
    def __init__(self, lifecycle: TaskLifecycle) -> None:
        self._lifecycle = lifecycle
        self._files = lifecycle.elsewhere.files

    def routes(self) -> Routes:
        return {
            task_messages.AskPlaces: Route(Role.USER, self._places),
            task_messages.FindFiles: Route(Role.SUBMITTER, self._find),
            task_messages.PutFiles: Route(Role.SUBMITTER, self._put),
        }

    def travels(self, who: Principal, snapshot: str) -> bool:
        """Return whether a task may run elsewhere: who submits it may, and its files are here."""
        return bool(snapshot) and who.may(Role.SUBMITTER) and self._files.has(who.owner, snapshot)

    async def _places(self, client: Client, ask: task_messages.AskPlaces) -> task_messages.Places:
        who, known = client.principal, self._lifecycle.runners.known.values()
        there = [runner for runner in known if runner.channel is not None]
        here = any(
            not r.sandbox and r.owner == who.owner and r.machine == ask.machine for r in there
        )
        may = self._lifecycle.elsewhere.may(who.owner)
        return task_messages.Places(here, may, may and any(r.sandbox for r in there))

    async def _find(
        self, client: Client, ask: task_messages.FindFiles
    ) -> task_messages.MissingFiles | messages.Refusal:
        try:
            return task_messages.MissingFiles(
                self._files.missing(client.principal.owner, ask.hashes)
            )
        except PoolError as error:
            return messages.refusal(str(error), "files")

    async def _put(
        self, client: Client, ask: task_messages.PutFiles
    ) -> messages.Done | messages.Refusal:
        try:
            for chunk in ask.chunks:
                self._files.put(client.principal.owner, chunk)
        except PoolError as error:
            return messages.refusal(str(error), "files")
        return messages.Done()
