"""The head of a pool: grants leases and watches nodes. Never on the data path.

It does not import torch, so it is there at once and stays small. An *embedded* pool's head hosts its
one agent itself, keeps its state in memory and ends with the program that started it. A *standing*
pool's head keeps its state in a file; it may end and start again at any moment, and sessions go on.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import assert_never

import shoal
from shoal.errors import ProtocolError
from shoal.pool.access.codes import JoinRefused
from shoal.pool.base import limits
from shoal.pool.head.enrolment import Enrolment
from shoal.pool.head.granting import Changes, Granting
from shoal.pool.head.leases import LeaseRefused, LeaseTable
from shoal.pool.head.nodes import Node, Nodes
from shoal.pool.head.session_ends import Client, Endings, Holder
from shoal.pool.head.store import Store, StoreError
from shoal.pool.wire import join_messages, messages, node_messages
from shoal.pool.wire.channel import Channel
from shoal.pool.wire.end_reasons import End, Why
from shoal.pool.wire.frames import Closed

OWNER = "owner"  # the client over a Unix socket: the user who started the pool, or root


class Head:
    def __init__(
        self,
        pool: str,
        store: Store,
        *,
        standing: bool,
        enrolment: Enrolment | None = None,
        table: LeaseTable | None = None,
        listen: str = "",
    ) -> None:
        self.pool = pool
        self.store = store
        self.standing = standing
        self.enrolment = enrolment
        self.listen = listen
        self.table = table or LeaseTable()
        self.nodes = Nodes(self.table, store)
        self.changes = Changes()
        self.ends = Endings(self.table, self.nodes, store, self.changes.notify)
        self.granting = Granting(
            self.table, self.nodes, store, self.ends, self.changes, standing=standing
        )
        self.holders = self.ends.holders
        self.uses = self.ends.uses
        self.connections: dict[str, set[Channel]] = {}  # by name, of those with a certificate
        self.started = time.time()
        self.nodes_lost = 0
        self._restore()

    def _restore(self) -> None:
        """Restore the leases of an earlier head: its clients and nodes come back."""
        stored = [s for s in self.store.leases() if s.granted.shares]
        self.table.restore(
            [s.granted for s in stored],
            self.store.counter("epoch", 0),
            self.store.counter("next_session", 1),
        )
        now = time.monotonic()
        for one in stored:
            self.holders[one.granted.lease] = Holder(one, None, now + limits.RESUME_S)
        self.nodes.expect({s.device for one in stored for s in one.granted.shares}, now)

    async def watch(self) -> None:
        """End what is silent or has expired, for ever."""
        while True:
            await asyncio.sleep(limits.RETRY_S if self.standing else limits.BEAT_S)
            now = time.monotonic()
            for node in self.nodes.silent(now):
                lost = self.nodes.lose(node)
                self.nodes_lost += 1
                end = End(Why.NODE_LOST, node.name)
                self.store.write_audit(time.time(), node.name, "node lost", end.text)
                self.ends.report_lost(lost, end)
                self.changes.notify()
            for lease, holder in list(self.holders.items()):
                if holder.deadline is not None and holder.deadline < now:
                    self.ends.end_lease(lease, End(Why.CLIENT_AWAY))
            self.granting.forget_ended()
            for lease in self.table.expired(time.time()):
                self.ends.end_lease(lease, End(Why.EXPIRED))
            self.ends.recent.forget_old(now)
            self.store.retry()

    # --- connections -------------------------------------------------------------------------------

    async def serve_local(self, channel: Channel) -> None:
        """Serve a connection of this machine. The acceptor has checked that its user is the pool's."""
        try:
            first = await channel.receive(join_messages.FIRST, limits.IDLE_S)
        except ProtocolError:
            return
        await self._serve(channel, OWNER, "", first)

    async def serve_network(self, channel: Channel) -> None:
        """Serve a remote connection. A stranger, without a certificate, may only ask to join."""
        assert self.enrolment is not None
        peer = channel.peer
        channel.frame_bytes_max = limits.ANONYMOUS_FRAME_BYTES_MAX
        try:
            first = await channel.receive(join_messages.FIRST, limits.FIRST_FRAME_S)
            if isinstance(first, join_messages.Join):
                channel.send(self.enrolment.join(first, channel.address))
                return
            if peer is None:
                return  # a stranger gets no answer
            self.enrolment.check(peer)
        except Closed:
            return
        except (ProtocolError, JoinRefused, StoreError) as error:
            if peer is not None or isinstance(error, JoinRefused):
                channel.send(messages.refusal(str(error)))
            return
        channel.frame_bytes_max = limits.FRAME_BYTES_MAX
        known = self.connections.setdefault(peer.name, set())
        known.add(channel)
        try:
            await self._serve(channel, peer.name, peer.role, first)
        finally:
            known.discard(channel)

    async def _serve(
        self, channel: Channel, name: str, role: str, first: join_messages.FirstMessage
    ) -> None:
        if isinstance(first, node_messages.NodeHello) and (name == OWNER or role == "node"):
            if name != OWNER and first.node != name:
                channel.send(messages.refusal(f"the certificate is for {name}, not {first.node}"))
                return
            await self._serve_node(channel, first)
        elif role == "node":
            channel.send(
                messages.refusal("a node only offers devices. To use some, join as a client")
            )
        elif isinstance(first, (node_messages.NodeHello, join_messages.Join)):
            channel.send(messages.refusal(f"a client does not send {type(first).__name__}"))
        else:
            await self._serve_client(Client(channel, name), first)

    # --- nodes -------------------------------------------------------------------------------------

    async def _serve_node(self, channel: Channel, hello: node_messages.NodeHello) -> None:
        try:
            if hello.shoal != shoal.__version__:
                raise ProtocolError(
                    f"node {hello.node} has shoal {hello.shoal}, the head {shoal.__version__}. "
                    "Install the same version on both."
                )
            node, lost = self.nodes.hello(hello, channel, time.monotonic())
            node.clock_ahead_s = hello.now - time.time()
        except (ProtocolError, StoreError) as error:
            channel.send(messages.refusal(str(error)))
            return
        channel.send(node_messages.NodeWelcome(self.pool, limits.BEAT_S if self.standing else 0.0))
        for one in lost:
            self.ends.report_lost([one], self.nodes.why_lost(node, hello, one))
        self.changes.notify()
        if not self.standing:
            node.heard = float("inf")  # its connection is watched instead of beats
        try:
            while True:
                message = await channel.receive(node_messages.FROM_NODE, None)
                if self.standing:
                    node.heard = time.monotonic()
                self._hear_node(node, message)
        except Closed:
            pass
        except ProtocolError as error:
            self.store.write_audit(time.time(), node.name, "node cut off", str(error))
        finally:
            self.nodes.disconnected(node, time.monotonic())
            for holder in list(self.holders.values()):
                self.ends.answer_missed(holder)
            self.changes.notify()

    def _hear_node(self, node: Node, message: node_messages.FromNode) -> None:
        match message:
            case messages.Beat():
                node.send(messages.Beat())
                return
            case node_messages.NodeGranted(index, session, epoch):
                if index in node.numbers:  # else it has just ended, and the grant with it
                    self.granting.taken.add((node.numbers[index], session, epoch))
                self.changes.notify()
                return
            case node_messages.DeviceMeasured():
                self.nodes.measured(node, message)
                return
            case node_messages.DeviceUp():
                lost = self.nodes.device_up(node, message)
                again = f"device server {message.device.name} ended and was started again"
                end = End(Why.SERVER_ENDED, again)
            case node_messages.DeviceDown():
                lost = self.nodes.device_down(node, message)
                end = End(Why.SERVER_ENDED, message.reason)
            case node_messages.NodeSessionEnded():
                lost = self.nodes.session_ended(node, message)
                end = message.end
                if not lost:
                    self.ends.hear_late(node, message)
            case _:
                assert_never(message)
        self.ends.report_lost(lost, end)
        self.changes.notify()

    # --- clients -----------------------------------------------------------------------------------

    async def _serve_client(self, client: Client, message: messages.FromClient) -> None:
        try:
            while True:
                answer = await self._answer(client, message)
                if answer is not None:
                    client.channel.send(answer)
                message = await client.channel.receive(
                    messages.FROM_CLIENT, self._patience_s(client)
                )
        except Closed:
            pass
        except (ProtocolError, LeaseRefused, StoreError) as error:
            client.channel.send(messages.refusal(str(error)))
        finally:
            self._client_gone(client)

    def _patience_s(self, client: Client) -> float | None:
        if client.lease is None:
            return limits.IDLE_S
        # On one machine the kernel tells when a client ends; it may be stopped for as long as it likes.
        return None if client.channel.is_local else limits.LEASE_SILENCE_S

    async def _answer(
        self, client: Client, message: messages.FromClient
    ) -> messages.FromHead | None:
        match message:
            case messages.Describe():
                await self.granting.until_ready()
                return messages.PoolInfo(self.nodes.infos())
            case messages.AskStatus():
                return self.status()
            case messages.AskProfiles(first):
                return self.nodes.profiles_from(first)
            case messages.AskLease():
                return await self.granting.lease(client, message)
            case messages.Resume():
                return self.granting.resume(client, message)
            case messages.Beat():
                self._note_use(client, message)
                return messages.Beat()
            case messages.LostSight():
                self.ends.lost_sight(client, message)
                return None
            case messages.Release():
                if client.lease is not None:
                    self.ends.end_lease(client.lease, End(Why.GIVEN_BACK))
                    client.lease = None
                return messages.Done()
            case _:
                return self._govern(client, message)

    def _govern(self, client: Client, message: messages.OwnerRequest) -> messages.FromHead:
        """Answer what only the pool's owner may ask, over the Unix socket of the head's machine."""
        if client.name != OWNER:
            raise ProtocolError(
                f"only the pool's owner may send {type(message).__name__}, on the head's machine"
            )
        match message:
            case messages.ReadAudit(count):
                rows = self.store.read_audit(count)
                return messages.AuditLog([messages.AuditEntry(*row) for row in rows])
            case messages.Measure(devices):
                return self._measure(devices)
            case messages.MakeCode():
                try:
                    return self._members().make_code(message)
                except JoinRefused as error:
                    raise ProtocolError(str(error)) from None
            case messages.ListClients():
                return self._members().list()
            case messages.RevokeClient(name):
                return self._revoke(name)
            case _:
                assert_never(message)

    def _members(self) -> Enrolment:
        if self.enrolment is None:
            raise ProtocolError(
                "this pool is for this machine only. Open it with: shoal up --listen ADDRESS"
            )
        return self.enrolment

    def _revoke(self, name: str) -> messages.Done:
        self._members().revoke(name)
        text = self._throw_out(name)
        if self.store.unwritten:
            text += (
                f". This is not on the disk yet: {self.store.error}. The head writes it as soon as it "
                "can; do not stop the head before. Check the disk with: df"
            )
        return messages.Done(text)

    def _measure(self, devices: list[int] | None) -> messages.Done:
        if not self.standing:
            raise ProtocolError(
                "the devices of a program's own pool are not measured. Start a pool with: shoal up"
            )
        numbers = None if devices is None else set(devices)
        return messages.Done(f"{self.nodes.measure(numbers)} device(s) will be measured")

    def _throw_out(self, name: str) -> str:
        """End all leases, devices and connections of a revoked client or node."""
        ended = [g.lease for g in self.table.held_by(name)]
        for lease in ended:
            self.ends.end_lease(lease, End(Why.REVOKED, name))
        self.ends.report_lost(self.nodes.forget(name), End(Why.REVOKED, f"node {name}"))
        for channel in self.connections.pop(name, set()):
            channel.hang_up()
        return f"{name} is revoked; {len(ended)} lease(s) ended"

    def _client_gone(self, client: Client) -> None:
        if client.lease is None:
            return
        if client.lease not in self.holders:
            self.ends.correct(client.lease, End(Why.CLIENT_ENDED))
            return
        holder = self.holders[client.lease]
        if holder.channel is not client.channel:
            return  # it came back on another connection already
        if client.channel.is_local:
            self.ends.end_lease(client.lease, End(Why.CLIENT_ENDED))
        else:
            # Devices that it has just closed its connection to, it lost by ending.
            self.ends.correct(client.lease, End(Why.CLIENT_ENDED))
            holder.channel = None
            holder.deadline = time.monotonic() + limits.RESUME_S

    def _note_use(self, client: Client, beat: messages.Beat) -> None:
        granted = self.table.leases.get(client.lease) if client.lease is not None else None
        mine = {s.part for s in granted.shares} if granted else set()
        for use in beat.uses:
            if (use.device, use.session) in mine:
                self.uses[use.device, use.session] = use

    # --- status ------------------------------------------------------------------------------------

    def status(self) -> messages.PoolStatus:
        sessions = [
            messages.SessionInfo(
                share.session, granted.lease, granted.epoch, granted.client,
                self.holders[granted.lease].stored.program if granted.lease in self.holders else "",
                share.device, share.memory_bytes,
                self.holders[granted.lease].stored.since if granted.lease in self.holders else 0.0,
                self.uses.get(share.part),
            )
            for granted in self.table.leases.values()
            for share in granted.shares
        ]  # fmt: skip
        return messages.PoolStatus(
            self.pool,
            shoal.__version__,
            os.getpid(),
            self.started,
            time.time(),
            self.listen,
            self.nodes.node_infos(time.monotonic()),
            self.nodes.infos(),
            sessions[: limits.SESSIONS_SHOWN_MAX],
            self._state(),
        )

    @property
    def counts(self) -> dict[str, int]:
        """Counters since the head started."""
        return {
            **self.granting.counts,
            "nodes_lost": self.nodes_lost,
            "state_writes_failed": self.store.failed_writes,
        }

    def _state(self) -> messages.StateInfo:
        store = self.store
        error = store.error[: limits.TEXT_CHARS_MAX]
        return messages.StateInfo(store.failed_writes, store.unwritten, error, store.free_bytes())
