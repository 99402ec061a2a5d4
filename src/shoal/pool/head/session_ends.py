"""Ends leases and sessions at the head, reports to their clients, and finds the reason.

The first report is not always nearest to the cause: a killed client closes its connections to workers
and head in any order, and the head may hear of a crashed worker after its lease was given back. So a
reason may be corrected for a moment (`end_reasons.RecentEnds`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.pool.base.clock import Clock
from shoal.pool.head.leases import LeaseTable, Lost
from shoal.pool.head.nodes import Node, Nodes
from shoal.pool.head.store import Store, StoredLease
from shoal.pool.wire import messages, node_messages
from shoal.pool.wire.channel import Channel
from shoal.pool.wire.end_reasons import End, Note, RecentEnds, Why
from shoal.pool.wire.frames import Silence
from shoal.pool.wire.message_fields import SessionPart
from shoal.pool.wire.roles import Principal


@dataclass
class Holder:
    """A lease's client: connected, or expected back."""

    stored: StoredLease
    channel: Channel | None
    deadline: float | None = None  # monotonic: comes back until then, or the lease ends
    missed: set[SessionPart] = field(default_factory=set)  # parts whose workers it cannot reach

    @property
    def lease(self) -> int:
        return self.stored.granted.lease


@dataclass
class Client:
    """A connection and the lease that it holds."""

    channel: Channel
    principal: Principal
    lease: int | None = None
    incoming: asyncio.Task[messages.FromClient] | None = None  # its next message, being read

    @property
    def name(self) -> str:
        return self.principal.name

    def next_message(self) -> asyncio.Task[messages.FromClient]:
        """Read the next message beside other work. It stays until `take_message`."""
        if self.incoming is None:
            reading = self.channel.receive(messages.FROM_CLIENT, None)
            self.incoming = asyncio.ensure_future(reading)
        return self.incoming

    def take_message(self) -> messages.FromClient:
        """Return the next message, which has come. Raise ProtocolError if the connection ended."""
        assert self.incoming is not None
        incoming, self.incoming = self.incoming, None
        return incoming.result()

    async def receive(self, timeout_s: float | None) -> messages.FromClient:
        """Return the next message. Raise ProtocolError if none comes in time."""
        if self.incoming is None:
            return await self.channel.receive(messages.FROM_CLIENT, timeout_s)
        await asyncio.wait({self.incoming}, timeout=timeout_s)
        if not self.incoming.done():
            raise Silence
        return self.take_message()

    def forget(self) -> None:
        """Stop reading: the connection is over."""
        if self.incoming is not None:
            self.incoming.cancel()


#: Ends that the client has brought about: the pool has lost nothing.
_BY_ITS_CLIENT = frozenset(
    {Why.GIVEN_BACK, Why.CLIENT_ENDED, Why.CLIENT_CLOSED, Why.CLIENT_AWAY, Why.EXPIRED, Why.REVOKED}
)


def _ignore(lease: int) -> None:
    pass


class Endings:
    """Keeps table, store and clients in agreement when a lease or a part of it ends.

    Args:
        change: called when devices or memory may have become free.
    """

    def __init__(
        self,
        table: LeaseTable,
        nodes: Nodes,
        store: Store,
        change: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._clock = clock
        self.holders: dict[int, Holder] = {}  # by lease
        self.uses: dict[SessionPart, messages.SessionUse] = {}
        self.recent = RecentEnds()
        # Called with a lease of which the pool has lost a device, and with one that has ended.
        self.on_lost: Callable[[int], None] = _ignore
        self.on_ended: Callable[[int], None] = _ignore
        self.on_parted: Callable[[int], None] = _ignore  # whatever it has lost: a part, or all
        self._table = table
        self._nodes = nodes
        self._store = store
        self._change = change

    def end_lease(self, lease: int, end: End) -> None:
        """End a lease on all its devices, and report it to its client, if connected."""
        granted = self._table.release(lease)
        holder = self.holders.pop(lease, None)
        if granted is None:
            self.correct(lease, end)
            return
        for share in granted.shares:
            self._nodes.revoke(share)
            self.uses.pop(share.part, None)
        self.on_ended(lease)
        self.on_parted(lease)
        note = self._store.end_lease(lease, granted.client, end, self._clock.now())
        parts = [s.part for s in granted.shares]
        if holder is not None:
            self._report(holder, parts, note)
        self._change()

    def report_lost(self, lost: list[Lost], end: End) -> None:
        """Note that leases have lost devices, and report it to their clients."""
        for one in lost:
            holder = self.holders.get(one.lease)
            if end.why is Why.CLIENT_CLOSED and holder is not None and holder.channel is None:
                end = End(Why.CLIENT_ENDED)  # it closed everything, and did not give it back
            note = self._store.lose(one, end, self._clock.now())
            parts = [s.part for s in one.shares]
            for part in parts:
                self.uses.pop(part, None)
            self.on_parted(one.lease)
            if end.why not in _BY_ITS_CLIENT:
                self.on_lost(one.lease)
            if one.ended:
                self.holders.pop(one.lease, None)
                self.on_ended(one.lease)
            if holder is not None:
                self._report(holder, parts, note)

    def _report(self, holder: Holder, parts: list[SessionPart], note: Note) -> None:
        granted = holder.stored.granted
        self.recent.add(
            granted.lease, granted.epoch, granted.client, holder.stored.secret, self._clock.monotonic(),
            parts, note,
        )  # fmt: skip
        if holder.channel is not None:
            holder.channel.send(messages.SessionsLost(parts, note.end))

    # --- why ---------------------------------------------------------------------------------------

    def correct(self, lease: int | None, end: End, part: SessionPart | None = None) -> None:
        """Take in a late reason. It replaces the one in the audit log if it is nearer to the cause."""
        for note in self.recent.correct(lease, end, self._clock.monotonic(), part):
            self._store.correct(note)

    def hear_late(self, node: Node, message: node_messages.NodeSessionEnded) -> None:
        """Take in the end of a worker after its lease's: it may have crashed before."""
        number = node.numbers.get(message.index)
        if number is not None:
            lease = self.recent.lease_of_epoch(message.epoch)
            self.correct(lease, message.end, (number, message.session))

    def lost_sight(self, client: Client, message: messages.LostSight) -> None:
        """Report why a client's connection to a worker is gone, once that is known."""
        if client.lease is None:
            return
        ended = self.recent.of(client.lease)
        for part in message.parts:
            if ended is not None and part in ended.parts:
                client.channel.send(messages.SessionsLost([part], ended.parts[part]))
        holder = self.holders.get(client.lease)
        granted = self._table.leases.get(client.lease)
        if holder is None or granted is None or holder.channel is not client.channel:
            return
        missed = [s for s in granted.shares if s.part in message.parts]
        holder.missed.update(s.part for s in missed)
        if message.seen is Why.WORKER_HUNG:  # only its client can know
            for share in missed:
                self._nodes.revoke(share)
            self.report_lost(self._table.lose(missed), End(Why.WORKER_HUNG))
            self._change()
        else:
            self.answer_missed(holder)

    def answer_missed(self, holder: Holder) -> None:
        """End sessions of a node that both client and head lost: its agent has ended."""
        granted = self._table.leases.get(holder.lease)
        for share in granted.shares if granted is not None and holder.missed else ():
            node = self._nodes.of_device(share.device)
            if share.part in holder.missed and node is not None and node.channel is None:
                lost = self._table.session_ended(*share.part, holder.stored.granted.epoch)
                self.report_lost(lost, End(Why.AGENT_ENDED, node.name))
                self._change()
