"""What the head does with each message of a client: a table of handlers, and the right that each needs.

A part of the head that answers messages has a method `routes()`. `Requests` joins them, checks the
right, and calls the handler. A message without a route cannot be answered: a test compares the table
with the link's union of messages.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from shoal.errors import ProtocolError
from shoal.pool.base.histogram import Histogram
from shoal.pool.head.session_ends import Client
from shoal.pool.wire import messages
from shoal.pool.wire import people_messages as people
from shoal.pool.wire import task_messages as tasks
from shoal.pool.wire.roles import Role

#: `async def handler(client, message)`: returns the answer, or None if there is none to give.
Handler = Callable[[Client, Any], Awaitable[messages.FromHead | None]]


class Changed(ProtocolError):
    """What a message is about is not as its sender saw it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} has changed since you saw it; look again, then decide")


@dataclass(frozen=True, slots=True)
class Route:
    role: Role  # the least that its sender must have
    handler: Handler


Routes = Mapping[type[msgspec.Struct], Route]


#: What is answered when something happens, and what holds another request of these inside.
_WAITING = frozenset(
    {messages.AskLease, messages.Describe, tasks.WaitTask, people.WebWatch, people.WebAsk}
)


class Requests:
    def __init__(self, *parts: Routes) -> None:
        self.latency = Histogram()
        self._routes: dict[type[msgspec.Struct], Route] = {}
        for part in parts:
            assert not self._routes.keys() & part.keys()
            self._routes.update(part)

    @property
    def kinds(self) -> set[type[msgspec.Struct]]:
        return set(self._routes)

    def role_of(self, kind: type[msgspec.Struct]) -> Role:
        return self._routes[kind].role

    async def answer(
        self, client: Client, message: messages.FromClient
    ) -> messages.FromHead | None:
        """Answer a message. Raise ProtocolError if its sender may not send it."""
        route = self._routes[type(message)]
        client.principal.require(route.role, f"send {type(message).__name__}")
        if type(message) in _WAITING:
            return await route.handler(client, message)
        begin = time.monotonic()
        try:
            return await route.handler(client, message)
        finally:
            self.latency.add(time.monotonic() - begin)
