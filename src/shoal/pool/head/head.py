"""The head of a pool: grants leases and watches nodes. Never on the data path.

It does not import torch, so it is there at once and stays small. An *embedded* pool's head hosts its
one agent itself, keeps its state in memory and ends with the program that started it. A *standing*
pool's head keeps its state in a file; it may end and start again at any moment, and sessions go on.
"""

from __future__ import annotations

import asyncio
import os
from itertools import islice
from pathlib import Path
from typing import assert_never

import shoal
from shoal.errors import ProtocolError
from shoal.pool.access.codes import JoinRefused
from shoal.pool.base import limits
from shoal.pool.base.clock import Clock, Randomness
from shoal.pool.head.admin_requests import AdminRequests
from shoal.pool.head.admitting import Admitting
from shoal.pool.head.client_link import ClientLink
from shoal.pool.head.enrolment import Enrolment
from shoal.pool.head.granting import Changes, Granting
from shoal.pool.head.lease_requests import LeaseRequests
from shoal.pool.head.leases import Granted, LeaseTable, Share
from shoal.pool.head.nodes import Node, Nodes
from shoal.pool.head.people.people import People
from shoal.pool.head.requests import Requests
from shoal.pool.head.session_ends import Client, Endings, Holder
from shoal.pool.head.session_reports import SessionReports
from shoal.pool.head.shown.status_pages import StatusPages
from shoal.pool.head.store import Store, StoreError
from shoal.pool.head.tasks.elsewhere import Elsewhere
from shoal.pool.head.tasks.files import SubmittedFiles
from shoal.pool.head.tasks.tasks import Tasks
from shoal.pool.head.why_requests import WhyRequests
from shoal.pool.planner.recorder import Recorder
from shoal.pool.planner.rounds import Planner
from shoal.pool.wire import (
    join_messages,
    messages,
    node_messages,
    roles,
    runner_messages,
)
from shoal.pool.wire.channel import Channel
from shoal.pool.wire.end_reasons import End, Why
from shoal.pool.wire.frames import Closed
from shoal.pool.wire.roles import Principal, Role
from shoal.tasks.rules import DEFAULT


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
        clock: Clock | None = None,
        randomness: Randomness | None = None,
        rule: str = DEFAULT,
        files: Path | None = None,
    ) -> None:
        self.pool = pool
        self.clock = clock or Clock()
        self.store = store
        self.standing = standing
        self.enrolment = enrolment
        self.listen = listen
        self.table = table or LeaseTable()
        self.nodes = Nodes(self.table, store)
        self.reports = SessionReports(self.table, self.nodes, self.clock)
        self.changes = Changes(self.clock)
        self.ends = Endings(self.table, self.nodes, store, self.changes.notify, self.clock)
        self.granting = Granting(
            self.table, self.nodes, store, self.ends, self.changes,
            self.clock, randomness or Randomness(), standing=standing,
        )  # fmt: skip
        self.admitting = Admitting(self.table, store, self.clock, rule)
        self.connections: dict[str, set[Channel]] = {}  # by name, of those with a certificate
        self.started = self.clock.now()
        self.nodes_lost = 0
        self._restore()
        self.tasks = Tasks(
            store, self.table, self.admitting, self.clock, randomness or Randomness(),
            lambda lease: self.ends.end_lease(lease, End(Why.GIVEN_BACK)),
            Elsewhere(SubmittedFiles(files), enrolment, self.nodes.endpoint),
        )  # fmt: skip
        self._tell_tasks()
        admin = AdminRequests(
            enrolment, self.nodes, store, self._throw_out, self.admitting.admission.uses.of,
            self.clock, standing=standing,
        )  # fmt: skip
        leases = LeaseRequests(
            self.admitting, self.granting, self.table, self.nodes, self.ends,
            self.clock, randomness or Randomness(), standing=standing,
        )  # fmt: skip
        clients = ClientLink(self.table, self.nodes, self.ends, self.granting, leases, self.clock)
        why = WhyRequests(self.admitting, self.tasks.requests.state_of)
        self.people = People(
            store, self.table, enrolment, self.changes, self.clock, randomness or Randomness(),
            self.status, self._grant_over, self.admitting,
        )  # fmt: skip
        self.requests = Requests(
            clients.routes(),
            admin.routes(),
            self.tasks.requests.routes(),
            why.routes(),
            self.reports.routes(),
            self.people.routes(),
            StatusPages(self.status).routes(),
        )
        self.people.complete(self.requests)
        leases.kept = self.people.grants
        self.ends.on_ended = self._lease_ended
        self.changes.first = self._look_again
        self.tasks.on_change = self._tell_of_tasks
        self._clients = clients

    def _tell_tasks(self) -> None:
        """Let the tasks hear of leases and devices."""
        tasks = self.tasks.lifecycle
        self.granting.tickets = tasks
        self.ends.on_lost = tasks.lease_lost
        self.changes.also = self.tasks.plans.wake

    def plan_tasks(self, records: Path | None) -> None:
        """Let a planner decide for tasks, and record its rounds there. None: the rule decides, and
        tasks that an earlier planner suspended go on."""
        planner = Planner(Recorder(records), fills=False) if records is not None else None
        self.tasks.plan(planner, self.nodes, self.reports)

    def _tell_of_tasks(self) -> None:
        self.people.web.notify("tasks")

    def _restore(self) -> None:
        """Restore the leases of an earlier head: its clients and nodes come back."""
        stored = [s for s in self.store.leases() if s.granted.shares]
        self.table.restore(
            [s.granted for s in stored],
            self.store.counter("epoch", 0),
            self.store.counter("next_session", 1),
            {number: node for number, (node, _) in self.store.devices().items()},
        )
        # All come at once, and a handshake takes its time: nobody is late while others are served.
        devices = {s.device for one in stored for s in one.granted.shares}
        served = self.clock.monotonic() + (len(stored) + len(devices)) / limits.RETURNS_PER_S
        for one in stored:
            self.ends.holders[one.granted.lease] = Holder(one, None, served + limits.RESUME_S)
            self.admitting.restore(one.granted)
        self.nodes.expect(devices, served)

    async def watch(self) -> None:
        """End what is silent or has expired, for ever, and start tasks."""
        tasks = asyncio.ensure_future(self.tasks.run())
        while True:
            if tasks.done():
                tasks.result()  # a bug: let the head end, and start again
            self.tasks.lifecycle.tick()
            self.admitting.tick()
            await asyncio.sleep(limits.RETRY_S if self.standing else limits.BEAT_S)
            now = self.clock.monotonic()
            for node in self.nodes.silent(now):
                lost = self.nodes.lose(node)
                self.nodes_lost += 1
                end = End(Why.NODE_LOST, node.name)
                self.store.write_audit(self.clock.now(), node.name, "node lost", end.text)
                self.ends.report_lost(lost, end)
                self.changes.notify()
            for lease, holder in list(self.ends.holders.items()):
                if holder.deadline is not None and holder.deadline < now:
                    self.ends.end_lease(lease, End(Why.CLIENT_AWAY))
            for lease in self.table.expired(self.clock.now()):
                self.ends.end_lease(lease, End(Why.EXPIRED))
            self.ends.recent.forget_old(now)
            self.store.retry()

    # --- connections -------------------------------------------------------------------------------

    async def serve_local(self, channel: Channel) -> None:
        """Serve a connection of this machine. The acceptor has checked that its user is the pool's."""
        try:
            first = await channel.receive(join_messages.FIRST, limits.IDLE_S)
        except Closed:
            return
        except ProtocolError as error:
            channel.send(messages.refusal(str(error)))
            return
        await self._serve(channel, roles.pool_owner(), first)

    async def serve_network(self, channel: Channel) -> None:
        """Serve a remote connection. A stranger, without a certificate, may only ask to join."""
        assert self.enrolment is not None
        peer = channel.peer
        if peer is None:
            channel.frame_bytes_max = limits.ANONYMOUS_FRAME_BYTES_MAX
        try:
            first = await channel.receive(join_messages.FIRST, limits.FIRST_FRAME_S)
            if isinstance(first, join_messages.Join):
                channel.send(await self.enrolment.join(first, channel.address))
                return
            if peer is None:
                return  # a stranger gets no answer
            role = roles.of_certificate(peer.role)
            if role is Role.TASK:
                who = self.tasks.principal(peer)
            else:
                self.enrolment.check(peer)
                if role is None:
                    raise ProtocolError(f"a {peer.role} does not ask the head for anything")
                who = roles.member(peer.name, role)
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
            await self._serve(channel, who, first)
        finally:
            known.discard(channel)

    async def _serve(
        self, channel: Channel, who: Principal, first: join_messages.FirstMessage
    ) -> None:
        is_node, is_owner = who.may(Role.NODE), who.may(Role.OWNER)
        if isinstance(first, node_messages.NodeHello) and (is_owner or is_node):
            if is_node and first.node != who.name:
                channel.send(
                    messages.refusal(f"the certificate is for {who.name}, not {first.node}")
                )
                return
            await self._serve_node(channel, first)
        elif isinstance(first, runner_messages.RunnerHello):
            pid = channel.peer_pid if is_owner else 0
            problem = _wrong_runner(who, first)
            if problem:
                channel.send(messages.refusal(problem))
                return
            await self.tasks.runners.serve(channel, who.owner, first, self.pool, pid)
        elif is_node:
            channel.send(
                messages.refusal("a node only offers devices. To use some, join as a client")
            )
        elif isinstance(first, (node_messages.NodeHello, join_messages.Join)):
            channel.send(messages.refusal(f"a client does not send {type(first).__name__}"))
        else:
            await self._clients.serve(Client(channel, who), first, self.requests)

    # --- nodes -------------------------------------------------------------------------------------

    async def _serve_node(self, channel: Channel, hello: node_messages.NodeHello) -> None:
        try:
            if hello.shoal != shoal.__version__:
                raise ProtocolError(
                    f"node {hello.node} has shoal {hello.shoal}, the head {shoal.__version__}. "
                    "Install the same version on both."
                )
            node, lost = self.nodes.hello(hello, channel, self.clock.monotonic())
            node.clock_ahead_s = hello.now - self.clock.now()
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
                    node.heard = self.clock.monotonic()
                self._hear_node(node, message)
        except Closed:
            pass
        except ProtocolError as error:
            self.store.write_audit(self.clock.now(), node.name, "node cut off", str(error))
        finally:
            self.nodes.disconnected(node, self.clock.monotonic())
            for holder in list(self.ends.holders.values()):
                self.ends.answer_missed(holder)
            self.changes.notify()

    def _hear_node(self, node: Node, message: node_messages.FromNode) -> None:
        match message:
            case messages.Beat():
                node.send(messages.Beat())
                return
            case node_messages.NodeGranted(index, session, epoch):
                if index in node.numbers:  # else it has just ended, and the grant with it
                    self.granting.taken(node.numbers[index], session, epoch)
                return
            case node_messages.NodeProcesses(processes):
                node.processes = processes
                return
            case node_messages.NodeGpu():
                self.nodes.gpu_changed(node, message)
                return
            case node_messages.NodeSessionProfile():
                self.reports.hear(node, message)
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

    # --- the end of leases --------------------------------------------------------------------------

    def _lease_ended(self, lease: int) -> None:
        self.tasks.lifecycle.lease_ended(lease)
        self.people.grants.lease_ended(lease)

    def _look_again(self) -> None:
        """Devices or memory may have become free: first for whom they are kept, then for others."""
        self.people.grants.keep()
        self.admitting.changed()

    def _grant_over(self, lease: int) -> None:
        self.ends.end_lease(lease, End(Why.EXPIRED))

    def _throw_out(self, name: str) -> str:
        """End all leases, devices and connections of a revoked client or node."""
        ended = {g.lease for g in (*self.table.held_by(name), *self.table.owned_by(name))}
        for lease in ended:
            self.ends.end_lease(lease, End(Why.REVOKED, name))
        self.ends.report_lost(self.nodes.forget(name), End(Why.REVOKED, f"node {name}"))
        for channel in self.connections.pop(name, set()):
            channel.hang_up()
        self.tasks.lifecycle.revoke(name)
        self.people.revoke(name)
        return f"{name} is revoked; {len(ended)} lease(s) ended"

    # --- status ------------------------------------------------------------------------------------

    def status(self) -> messages.PoolStatus:
        shares = ((g, share) for g in self.table.leases.values() for share in g.shares)
        shown = islice(shares, limits.SESSIONS_SHOWN_MAX)
        return messages.PoolStatus(
            self.pool,
            shoal.__version__,
            os.getpid(),
            self.started,
            self.clock.now(),
            self.listen,
            self.nodes.node_infos(self.clock.monotonic()),
            self.nodes.infos(),
            [self._session_info(granted, share) for granted, share in shown],
            self._state(),
            self._processes(),
        )

    def _session_info(self, granted: Granted, share: Share) -> messages.SessionInfo:
        holder = self.ends.holders.get(granted.lease)
        return messages.SessionInfo(
            share.session, granted.lease, granted.epoch, granted.client,
            holder.stored.program if holder is not None else "",
            share.device, share.memory_bytes,
            holder.stored.since if holder is not None else 0.0,
            self.ends.uses.get(share.part), self.reports.shown(share, granted.epoch),
        )  # fmt: skip

    def _processes(self) -> list[messages.ProcessInfo]:
        """Return the pool's processes, as far as they have reported."""
        local = next(
            (n for n in self.nodes.nodes.values() if n.channel and n.channel.is_local), None
        )
        name = local.name if local is not None else ""
        found = [messages.ProcessInfo("head", os.getpid(), name)]
        if self.tasks.planner_pid is not None:
            found.append(messages.ProcessInfo("planner", self.tasks.planner_pid, name))
        for runner in self.tasks.runners.known.values():
            if runner.channel is not None:
                found.append(messages.ProcessInfo("runner", runner.pid, runner.node))
        for node in self.nodes.nodes.values():
            if node.channel is not None:
                found += node.processes
        return found

    @property
    def counts(self) -> dict[str, int]:
        """Counters since the head started."""
        return {
            **self.granting.counts,
            **self.tasks.lifecycle.counts,
            "nodes_lost": self.nodes_lost,
            "state_writes_failed": self.store.failed_writes,
        }

    def _state(self) -> messages.StateInfo:
        store = self.store
        error = store.error[: limits.TEXT_CHARS_MAX]
        return messages.StateInfo(store.failed_writes, store.unwritten, error, store.free_bytes())


def _wrong_runner(who: Principal, hello: runner_messages.RunnerHello) -> str:
    """Return why somebody may not be this runner, if so. Only nodes run programs of others."""
    is_node = who.may(Role.NODE)
    if hello.sandbox and is_node and hello.name != f"tasks@{who.name}":
        return f"the certificate is for {who.name}, not for {hello.name}"
    if hello.sandbox and not is_node and not who.may(Role.OWNER):
        return "only a node runs programs of others. Type there: shoal node --tasks"
    if not hello.sandbox and not who.may(Role.USER):
        return f"{who.name} runs no programs of its own"
    return ""
