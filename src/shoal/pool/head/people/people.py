"""All that the head does for people: events, browsers and tokens, and the history that charts show."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from shoal.errors import ProtocolError
from shoal.people.rules import Facts
from shoal.pool.base import limits
from shoal.pool.base.clock import Clock, Randomness
from shoal.pool.head.admitting import Admitting
from shoal.pool.head.enrolment import Enrolment
from shoal.pool.head.granting import Changes
from shoal.pool.head.leases import LeaseTable
from shoal.pool.head.people.event_grants import EventGrants
from shoal.pool.head.people.event_store import EventStore
from shoal.pool.head.people.events import Events
from shoal.pool.head.people.history import Histories
from shoal.pool.head.people.web_access import WebAccess
from shoal.pool.head.requests import Requests, Routes
from shoal.pool.head.store import Store
from shoal.pool.wire import messages, roles
from shoal.pool.wire.roles import Role


class People:
    """Args:
    status: the pool as it is now.
    end_lease: ends a lease whose grant is over.
    """

    def __init__(
        self,
        store: Store,
        table: LeaseTable,
        enrolment: Enrolment | None,
        changes: Changes,
        clock: Clock,
        random: Randomness,
        status: Callable[[], messages.PoolStatus],
        end_lease: Callable[[int], None],
        admitting: Admitting,
    ) -> None:
        self._store = store
        self._table = table
        self._enrolment = enrolment
        self._changes = changes
        self._clock = clock
        self._status = status
        self._used_device_s = admitting.admission.uses.of  # which fade
        self.web = WebAccess(store, clock, random, self._role_of)
        self.grants = EventGrants(
            table, admitting, clock, self._is_member, self._is_revoked, end_lease
        )
        self.events = Events(
            EventStore(store), self.grants, clock, random, self._facts, self._devices_free,
            self.web.guest_token, self._join_code, self.web.notify,
        )  # fmt: skip
        self.histories = Histories()
        if enrolment is not None:
            enrolment.on_joined = self.events.joined

    def routes(self) -> Routes:
        return {**self.events.routes(), **self.web.routes(), **self.histories.routes()}

    def complete(self, requests: Requests) -> None:
        """Take the table of all handlers, to which a browser's messages go as well."""
        self.web.requests = requests

    async def watch(self) -> None:
        """Run what needs a clock, for ever."""
        await asyncio.gather(self.events.watch(), self._watch_pool())

    async def _watch_pool(self) -> None:
        while True:
            if await self._changes.wait(self._clock.monotonic() + limits.POOL_CHANGE_WAIT_S):
                self.web.notify("pool")
            now = self._clock.now()
            if self.histories.due(now):
                self.histories.sample(self._status(), now)
                self.web.notify("history")

    def revoke(self, name: str) -> None:
        """End what a revoked member has in browsers and events."""
        self.web.revoke_member(name)
        self.events.revoke(name)
        self.grants.forget(name)

    # --- what events ask of the pool ---------------------------------------------------------------

    def _role_of(self, name: str) -> Role | None:
        if name == roles.OWNER:
            return Role.ADMIN  # the owner's own rights need the Unix socket
        return self._enrolment.role_of(name) if self._enrolment is not None else None

    def _is_member(self, name: str) -> bool:
        return self._enrolment is not None and self._enrolment.knows(name)

    def _is_revoked(self, name: str) -> bool:
        return self._is_member(name) and self._role_of(name) is None

    def _devices_free(self) -> int:
        """Count the devices that nobody holds, and that are kept for nobody."""
        table = self._table
        return sum(
            device.present and not table.sessions(number) and not table.reserved_bytes(number)
            for number, device in table.devices.items()
        )

    def _facts(self, names: list[str]) -> Mapping[str, Facts]:
        now = self._clock.now()
        return {name: Facts(self._used_device_s(name, now)) for name in names}

    async def _join_code(self) -> str:
        """Make the code with which a guest who was granted a place joins the pool."""
        if self._enrolment is None:
            return ""
        ask = messages.MakeCode(Role.USER, limits.GUEST_CODE_S, devices_max=0)  # but the grant
        try:
            return (await self._enrolment.make_code(ask, roles.pool_owner())).code
        except ProtocolError:
            return ""  # too many codes wait to be used; the guest's next look tries again
