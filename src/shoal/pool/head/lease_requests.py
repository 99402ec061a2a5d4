"""Requests for leases: each goes through admission, and is granted, refused at once, or waits.

A client that waits is shown its place and its reasons every few seconds. It sends beats, as with a
lease; when it is silent or gone, or says Release, its request is withdrawn.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from shoal.errors import ProtocolError
from shoal.pool.base import limits
from shoal.pool.base.clock import Clock, Randomness
from shoal.pool.head.admitting import Admitting
from shoal.pool.head.granting import Granting
from shoal.pool.head.leases import Granted, LeaseRefused, LeaseTable, Request
from shoal.pool.head.nodes import Nodes
from shoal.pool.head.placement import check
from shoal.pool.head.session_ends import Client, Endings
from shoal.pool.wire import admission_messages, messages
from shoal.pool.wire.end_reasons import End, Why
from shoal.pool.wire.frames import Silence
from shoal.pool.wire.roles import Role
from shoal.tasks.reasons import Reason
from shoal.tasks.requests import Ask
from shoal.tasks.room import Needs


class KeptDevices(Protocol):
    """Who keeps devices for members: what events have granted."""

    def lease(self, request: Request, ask: messages.AskLease) -> Granted | None: ...


_SYMBOLS = "0123456789abcdefghjkmnpqrstvwxyz"


class LeaseRequests:
    def __init__(
        self,
        admitting: Admitting,
        granting: Granting,
        table: LeaseTable,
        nodes: Nodes,
        ends: Endings,
        clock: Clock,
        randomness: Randomness,
        *,
        standing: bool,
    ) -> None:
        self._admitting = admitting
        self._granting = granting
        self._table = table
        self._nodes = nodes
        self._ends = ends
        self._clock = clock
        self._random = randomness
        self._standing = standing
        self._waiting = 0
        self._turns = asyncio.Lock()
        self.kept: KeptDevices | None = None

    @contextlib.asynccontextmanager
    async def in_turn(self) -> AsyncIterator[None]:
        """Let the loop hear others between two requests: hundreds may come at once."""
        async with self._turns:
            yield
            await asyncio.sleep(0)

    async def lease(self, client: Client, ask: messages.AskLease) -> messages.FromHead:
        """Answer a request for a lease, now or when its devices are free."""
        if client.lease is not None and client.lease in self._ends.holders:
            raise LeaseRefused("this connection already has a lease")
        _check(ask)
        await self._granting.until_ready()
        if ask.ticket:  # a task's program: its devices are reserved
            return await self._granting.lease(client, ask)
        client.principal.require(Role.USER, "lease other devices than its task was planned with")
        request = self._granting.request(client, ask)
        try:
            check(request)
            return await _Asking(self, client, ask, request).answer()
        except LeaseRefused as refused:
            self._granting.counts["leases_refused"] += 1
            refused.reasons[:0] = self._nodes.failures()
            return messages.refusal(str(refused))

    def new_name(self) -> str:
        while True:
            name = f"r-{self._random.text(_SYMBOLS, 5)}"
            if not self._admitting.knows(name):
                return name


def _check(ask: messages.AskLease) -> None:
    if ask.duration_s is not None and not 0 < ask.duration_s < 10 * 365 * 86400:
        raise LeaseRefused(f"duration_s must be above 0 and below ten years (got {ask.duration_s})")
    if ask.wait_s is not None and not 0 < ask.wait_s <= limits.WAIT_S_MAX:
        raise LeaseRefused(
            f"wait must be above 0 and at most {limits.WAIT_S_MAX:.0f} s (got {ask.wait_s})"
        )
    if ask.devices is not None and not 1 <= ask.devices <= limits.DEVICES_PER_LEASE_MAX:
        raise LeaseRefused(
            f"devices must be from 1 to {limits.DEVICES_PER_LEASE_MAX} (got {ask.devices})."
        )


class _Asking:
    """One request, from its message to its answer."""

    def __init__(
        self, requests: LeaseRequests, client: Client, ask: messages.AskLease, request: Request
    ) -> None:
        self._r = requests
        self._client = client
        self._ask = ask
        self._request = request
        self._name = requests.new_name()
        self._asked = requests._clock.now()
        self._granted: asyncio.Future[Granted] = asyncio.get_running_loop().create_future()
        self._refused: LeaseRefused | None = None
        self._shown: admission_messages.Waiting | None = None

    async def answer(self) -> messages.FromHead:
        deadline = self._r._clock.monotonic() + limits.RECOVERY_S
        while True:
            try:
                async with self._r.in_turn():
                    self._enter()
                granted = await self._until_granted(deadline)
                return await self._r._granting.finish(self._client, self._ask, granted)
            except LeaseRefused:
                # A device server or agent that just ended is back in a moment.
                over = not self._ask.wait and not self._recovering(deadline)
                if over or self._refused is not None:
                    raise
            finally:
                self._leave()

    # --- admission ---------------------------------------------------------------------------------

    def _enter(self) -> None:
        self._granted = asyncio.get_running_loop().create_future()
        if self._take_kept():
            return
        wanted = self._request
        needs = Needs(wanted.count, wanted.memory_bytes, wanted.fraction, wanted.kind)
        ask = Ask(
            self._name, wanted.accountable, needs, limit_s=self._ask.duration_s, asked=self._asked
        )
        self._r._admitting.add(ask, self._book, lambda: None)

    def _take_kept(self) -> bool:
        """Take what an event has granted to this client, if that is enough."""
        kept = self._r.kept.lease(self._request, self._ask) if self._r.kept is not None else None
        if kept is None:
            return False
        if self._r._admitting.knows(self._name):
            self._r._admitting.withdraw(self._name)
        self._granted.set_result(kept)
        return True

    def _book(self, devices: tuple[int, ...]) -> Mapping[int, int] | None:
        if self._granted.done():
            return None
        until = self._ask.duration_s
        request = dataclasses.replace(
            self._request,
            only=frozenset(devices),
            until=None if until is None else self._r._clock.now() + until,
        )
        try:
            granted = self._r._table.grant(request)
        except LeaseRefused:
            return None  # admission tries again
        self._r._admitting.holds_lease(self._name, granted.lease)
        self._granted.set_result(granted)
        return {share.device: share.memory_bytes for share in granted.shares}

    def _leave(self) -> None:
        """Withdraw, unless the lease is the client's by now."""
        if not self._granted.done():
            if self._r._admitting.knows(self._name):
                self._r._admitting.withdraw(self._name)
        elif self._client.lease != self._granted.result().lease:
            self._r._ends.end_lease(self._granted.result().lease, End(Why.NOT_GRANTED))
        self._name = self._r.new_name()  # a name is used once

    def _recovering(self, deadline: float) -> bool:
        return self._r._granting.recovering() and self._r._clock.monotonic() < deadline

    # --- waiting -----------------------------------------------------------------------------------

    async def _until_granted(self, deadline: float) -> Granted:
        """Wait as long as the client wants. Raise LeaseRefused with the reasons at the end."""
        if not self._ask.wait:
            while not self._granted.done() and self._r._granting.recovering():
                if not await self._r._granting.changes.wait(deadline):
                    break
            if not self._granted.done():
                raise self._refusal("")
            return self._granted.result()
        if not self._granted.done():
            await self._wait()
        return self._granted.result()

    async def _wait(self) -> None:
        clock, client = self._r._clock, self._client
        start = heard = clock.monotonic()
        next_look = start
        if self._r._waiting >= limits.WAITING_MAX:
            raise LeaseRefused(f"{limits.WAITING_MAX} requests wait already. Try again later.")
        self._r._waiting += 1
        try:
            while not self._granted.done() and not self._take_kept():
                now = clock.monotonic()
                if self._ask.wait_s is not None and now - start >= self._ask.wait_s:
                    raise self._refusal(f"no devices within {self._ask.wait_s:g} s. ")
                if not client.channel.is_local and now - heard > limits.LEASE_SILENCE_S:
                    raise Silence
                if now >= next_look:
                    # Those far behind are shown less often: there may be thousands.
                    far = await self._show() > limits.WAIT_ESTIMATED_MAX
                    next_look = now + limits.WAIT_REPORT_S * (6 if far else 1)
                incoming = client.next_message()
                left_s = limits.WAIT_REPORT_S
                if self._ask.wait_s is not None:
                    left_s = min(left_s, max(0.0, self._ask.wait_s - (now - start)))
                either: set[asyncio.Future[Any]] = {self._granted, incoming}
                first = asyncio.FIRST_COMPLETED
                await asyncio.wait(either, timeout=left_s, return_when=first)
                if incoming.done() and not self._granted.done():
                    self._hear(client.take_message())
                    heard = clock.monotonic()
        finally:
            self._r._waiting -= 1

    def _hear(self, message: messages.FromClient) -> None:
        match message:
            case messages.Beat():
                self._client.channel.send(messages.Beat())
            case messages.Release():
                self._refused = LeaseRefused("the request was withdrawn")
                raise self._refused
            case _:
                raise ProtocolError(f"a client that waits does not send {type(message).__name__}")

    async def _show(self) -> int:
        """Tell the client what it waits for, if that is news. Return its place."""
        if not self._r._admitting.waits(self._name):
            return 0
        place = self._r._admitting.recent_position(self._name)
        if place <= limits.WAIT_ESTIMATED_MAX:
            why = await self._r._admitting.why(self._name)
        else:
            async with self._r.in_turn():
                if not self._r._admitting.waits(self._name):
                    return 0
                why = self._r._admitting.why_without_estimate(self._name, place)
        if self._granted.done() or not self._r._admitting.waits(self._name):
            return 0
        message = admission_messages.Waiting(self._name, place, why)
        if message != self._shown:
            self._shown = message
            self._client.channel.send(message)
        return place

    def _refusal(self, summary: str) -> LeaseRefused:
        """Return why there is no lease: what the devices lack, or who goes first."""
        self._refused = self._r._table.refusal(self._request)
        if self._refused is None:
            found: list[Reason] = []
            if self._r._admitting.waits(self._name):
                found = self._r._admitting.reasons(self._name)
            self._refused = LeaseRefused(
                "there is room, but others go first.",
                [reason.text for reason in found],
                ["waiting: shoal.connect(wait=True), or SHOAL_WAIT=1"],
            )
        elif not self._ask.wait and self._r._table.could_ever(self._request):
            self._refused.unblock.append("waiting: shoal.connect(wait=True), or SHOAL_WAIT=1")
        self._refused.summary = summary + self._refused.summary
        return self._refused
