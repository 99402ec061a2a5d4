"""Grants leases at the head, and resumes those of clients that come back."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable
from typing import Protocol

from shoal.errors import ProtocolError
from shoal.pool.base import limits
from shoal.pool.base.clock import Clock, Randomness
from shoal.pool.head.leases import Granted, LeaseRefused, LeaseTable, Request, Share
from shoal.pool.head.nodes import Nodes
from shoal.pool.head.session_ends import Client, Endings, Holder
from shoal.pool.head.store import Store, StoredLease, StoreError
from shoal.pool.wire import messages, node_messages
from shoal.pool.wire.end_reasons import End, Why
from shoal.pool.wire.message_fields import SessionPart
from shoal.pool.wire.roles import Principal


class Changes:
    """Wakes requests when devices or memory may have become free."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = asyncio.Event()
        self.first: Callable[[], None] | None = None  # called before those who wait
        self.also: Callable[[], None] | None = None  # called as well

    def notify(self) -> None:
        if self.first is not None:
            self.first()
        if self.also is not None:
            self.also()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait(self, deadline: float) -> bool:
        """Wait for a change. Return False if none came before `deadline` (monotonic)."""
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock.monotonic())):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True


class Tickets(Protocol):
    """Who knows what was planned for the program that shows a ticket: the head's tasks."""

    def request_of(self, ticket: str, who: Principal, ask: messages.AskLease) -> Request: ...
    def leased(self, ticket: str, granted: Granted) -> None: ...
    def not_leased(self, ticket: str) -> None: ...


class _Given:
    """A grant that device servers are to confirm."""

    def __init__(self, parts: set[SessionPart]) -> None:
        self.missing = parts
        self.whole: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def settle(self, *, whole: bool) -> None:
        if not self.whole.done():
            self.whole.set_result(whole)


class Granting:
    def __init__(
        self,
        table: LeaseTable,
        nodes: Nodes,
        store: Store,
        ends: Endings,
        changes: Changes,
        clock: Clock,
        randomness: Randomness,
        *,
        standing: bool,
    ) -> None:
        self.changes = changes
        self.counts = {"leases_granted": 0, "leases_refused": 0}
        self._given: dict[int, _Given] = {}  # grants under way, by lease
        self.tickets: Tickets | None = None  # of the pool's tasks
        self._table = table
        self._nodes = nodes
        self._store = store
        self._ends = ends
        self._standing = standing
        self._clock = clock
        self._random = randomness
        ends.on_parted = self.parted

    def taken(self, device: int, session: int, epoch: int) -> None:
        """Note that a device server has a grant."""
        given = self._given.get(epoch)  # a lease is numbered by its first epoch
        if given is not None:
            given.missing.discard((device, session))
            if not given.missing:
                given.settle(whole=True)

    def parted(self, lease: int) -> None:
        """Note that a lease has lost a part, or has ended."""
        if lease in self._given:
            self._given[lease].settle(whole=False)

    async def until_ready(self) -> None:
        """Wait while an embedded pool's devices start, to choose from all of them.

        In a standing pool a request does not wait for a node that is starting.
        """
        deadline = self._clock.monotonic() + limits.START_WAIT_S
        while not self._standing and (self._nodes.starting or not self._nodes.nodes):
            if not await self.changes.wait(deadline):
                return

    async def lease(self, client: Client, ask: messages.AskLease) -> messages.FromHead:
        """Grant a lease to the program of a task: what is reserved for it."""
        assert self.tickets is not None
        deadline = self._clock.monotonic() + limits.RECOVERY_S
        while True:
            try:
                wanted = self.tickets.request_of(ask.ticket, client.principal, ask)
                return await self.finish(client, ask, self._table.grant(wanted))
            except LeaseRefused as refused:
                # A device server or agent that just ended is back in a moment.
                recovering = self.recovering() and not refused.final
                if not recovering or not await self.changes.wait(deadline):
                    self.counts["leases_refused"] += 1
                    if not refused.final:
                        self.tickets.not_leased(ask.ticket)
                    refused.reasons[:0] = self._nodes.failures()
                    return messages.refusal(str(refused))

    def recovering(self) -> bool:
        """Return whether devices of a standing pool may be back in a moment."""
        nodes = self._nodes.nodes.values()
        away = any(n.channel is None or n.starting or n.failures for n in nodes) or not nodes
        return self._standing and away

    def request(self, client: Client, ask: messages.AskLease) -> Request:
        """Return what a client asks for."""
        return Request(
            count=1 if ask.devices is None else ask.devices,
            memory_bytes=ask.memory_bytes,
            fraction=ask.fraction,
            kind=ask.kind,
            client=client.name,
            owner=client.principal.owner,
            avoid=frozenset(ask.sessions_in_use),
        )

    async def finish(
        self, client: Client, ask: messages.AskLease, granted: Granted
    ) -> messages.Lease:
        """Write a lease that the table has, and give it to its device servers and its client."""
        now = self._clock.now()
        secret = self._random.token(24) if self._standing else ""
        stored = StoredLease(granted, _hash(secret), ask.program, now)
        try:  # before any node or client hears of it
            await self._store.flushed(self._store.add_lease(stored, self._table))
        except StoreError:
            self._table.release(granted.lease)
            self._store.end_lease(granted.lease, client.name, End(Why.NOT_GRANTED), now)
            raise
        self._ends.holders[granted.lease] = Holder(stored, client.channel)
        if self.tickets is not None and ask.ticket:
            self.tickets.leased(ask.ticket, granted)
        client.lease = granted.lease
        self.counts["leases_granted"] += 1
        given = self._given[granted.lease] = _Given({s.part for s in granted.shares})
        devices = [self._grant_share(granted, share) for share in granted.shares]
        if not await self._until_taken(granted, given):
            self._ends.end_lease(granted.lease, End(Why.NOT_GRANTED))
            client.lease = None
            raise LeaseRefused("a device of the lease went away at this moment. Ask again.")
        return messages.Lease(
            granted.lease, granted.epoch, [d for d in devices if d is not None], secret
        )

    async def _until_taken(self, granted: Granted, given: _Given) -> bool:
        """Wait until all device servers have the grant. Return False if one does not get it."""
        now = self._table.leases.get(granted.lease)
        if now is None or len(now.shares) < len(granted.shares):
            given.settle(whole=False)
        try:
            async with asyncio.timeout(limits.GRANT_S):
                return await given.whole
        except TimeoutError:
            return False
        finally:
            del self._given[granted.lease]

    def _grant_share(self, granted: Granted, share: Share) -> messages.GrantedDevice | None:
        token = self._random.token(24)
        grant = node_messages.Grant(
            token,
            share.session,
            share.memory_bytes,
            granted.lease,
            granted.epoch,
            granted.client,
            share.limit_bytes,
        )
        return self._nodes.grant(share, grant)

    def resume(self, client: Client, ask: messages.Resume) -> messages.FromHead:
        """Resume a client's lease. A late client gets the reason why it ended, if that is known."""
        ended = self._ends.recent.of(ask.lease)
        if ended is not None and not (
            (ended.epoch, ended.client) == (ask.epoch, client.name)
            and hmac.compare_digest(ended.secret, _hash(ask.secret))
        ):
            ended = None
        try:
            granted = self._table.resume(ask.lease, ask.epoch, client.name)
        except LeaseRefused as refused:
            if ended is not None and ended.parts:
                parts = list(ended.parts)
                return messages.SessionsLost(parts, ended.parts[parts[-1]])
            return messages.refusal(str(refused))
        holder = self._ends.holders[ask.lease]
        if not hmac.compare_digest(holder.stored.secret, _hash(ask.secret)):
            raise ProtocolError("the lease belongs to another program")
        holder.channel, holder.deadline = client.channel, None
        client.lease = ask.lease
        gone = ended.parts.items() if ended is not None else ()
        return messages.Resumed(
            [s.part for s in granted.shares], [messages.PartEnded(p, end) for p, end in gone]
        )


def _hash(secret: str) -> str:
    return hashlib.sha256(b"shoal lease " + secret.encode()).hexdigest()
