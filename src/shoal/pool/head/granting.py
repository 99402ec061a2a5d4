"""Grants leases at the head, and resumes those of clients that come back."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time

from shoal.errors import ProtocolError
from shoal.pool.base import limits
from shoal.pool.head.leases import Granted, LeaseRefused, LeaseTable, Request, Share
from shoal.pool.head.nodes import Nodes
from shoal.pool.head.session_ends import Client, Endings, Holder
from shoal.pool.head.store import Store, StoredLease, StoreError
from shoal.pool.wire import messages, node_messages
from shoal.pool.wire.end_reasons import End, Why


class Changes:
    """Wakes requests when devices or memory may have become free."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait(self, deadline: float) -> bool:
        """Wait for a change. Return False if none came before `deadline` (monotonic)."""
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True


class Granting:
    def __init__(
        self,
        table: LeaseTable,
        nodes: Nodes,
        store: Store,
        ends: Endings,
        changes: Changes,
        *,
        standing: bool,
    ) -> None:
        self.changes = changes
        self.counts = {"leases_granted": 0, "leases_refused": 0}
        # Device, session, epoch that device servers have; until the client has its lease.
        self.taken: set[tuple[int, int, int]] = set()
        self._table = table
        self._nodes = nodes
        self._store = store
        self._ends = ends
        self._standing = standing

    def forget_ended(self) -> None:
        """Forget grants of leases that have ended."""
        epochs = {g.epoch for g in self._table.leases.values()}
        self.taken = {t for t in self.taken if t[2] in epochs}

    async def until_ready(self) -> None:
        """Wait while an embedded pool's devices start, to choose from all of them.

        In a standing pool a request does not wait for a node that is starting.
        """
        deadline = time.monotonic() + limits.START_WAIT_S
        while not self._standing and (self._nodes.starting or not self._nodes.nodes):
            if not await self.changes.wait(deadline):
                return

    async def lease(self, client: Client, ask: messages.AskLease) -> messages.FromHead:
        if client.lease is not None and client.lease in self._ends.holders:
            raise LeaseRefused("this connection already has a lease")
        if ask.duration_s is not None and not 0 < ask.duration_s < 10 * 365 * 86400:
            raise LeaseRefused(
                f"duration_s must be above 0 and below ten years (got {ask.duration_s})"
            )
        await self.until_ready()
        deadline = time.monotonic() + limits.RECOVERY_S
        while True:
            try:
                return await self._grant(client, ask)
            except LeaseRefused as refused:
                # A device server or agent that just ended is back in a moment.
                recovering = self._standing and self._recovering()
                if not recovering or not await self.changes.wait(deadline):
                    self.counts["leases_refused"] += 1
                    refused.reasons[:0] = self._nodes.failures()
                    return messages.refusal(str(refused))

    def _recovering(self) -> bool:
        nodes = self._nodes.nodes.values()
        return any(n.channel is None or n.starting or n.failures for n in nodes) or not nodes

    async def _grant(self, client: Client, ask: messages.AskLease) -> messages.Lease:
        now = time.time()
        request = Request(
            count=1 if ask.devices is None else ask.devices,
            memory_bytes=ask.memory_bytes,
            fraction=ask.fraction,
            kind=ask.kind,
            client=client.name,
            until=None if ask.duration_s is None else now + ask.duration_s,
            avoid=frozenset(ask.sessions_in_use),
        )
        granted = self._table.grant(request)
        secret = secrets.token_urlsafe(24) if self._standing else ""
        stored = StoredLease(granted, _hash(secret), ask.program, now)
        try:
            self._store.add_lease(stored, self._table)  # before any node or client hears of it
        except StoreError:
            self._table.release(granted.lease)
            raise
        self._ends.holders[granted.lease] = Holder(stored, client.channel)
        client.lease = granted.lease
        self.counts["leases_granted"] += 1
        devices = [self._grant_share(granted, share) for share in granted.shares]
        if not await self._taken(granted):
            self._ends.end_lease(granted.lease, End(Why.NOT_GRANTED))
            client.lease = None
            raise LeaseRefused("a device of the lease went away at this moment. Ask again.")
        return messages.Lease(
            granted.lease, granted.epoch, [d for d in devices if d is not None], secret
        )

    async def _taken(self, granted: Granted) -> bool:
        """Wait until all device servers have the grant. Return False if one does not get it."""
        deadline = time.monotonic() + limits.GRANT_S
        wanted = {(*s.part, granted.epoch) for s in granted.shares}
        while granted.lease in self._table.leases:
            if len(self._table.leases[granted.lease].shares) < len(granted.shares):
                return False
            if wanted <= self.taken:
                self.taken -= wanted
                return True
            if not await self.changes.wait(deadline):
                return False
        return False

    def _grant_share(self, granted: Granted, share: Share) -> messages.GrantedDevice | None:
        token = secrets.token_urlsafe(24)
        grant = node_messages.Grant(
            token, share.session, share.memory_bytes, granted.lease, granted.epoch, granted.client
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
            raise ProtocolError("the lease is another program's")
        holder.channel, holder.deadline = client.channel, None
        client.lease = ask.lease
        gone = ended.parts.items() if ended is not None else ()
        return messages.Resumed(
            [s.part for s in granted.shares], [messages.PartEnded(p, end) for p, end in gone]
        )


def _hash(secret: str) -> str:
    return hashlib.sha256(b"shoal lease " + secret.encode()).hexdigest()
