"""The head's link to a client: answers its messages, and ends what it leaves behind."""

from __future__ import annotations

from shoal.errors import ShoalError
from shoal.pool.base import limits
from shoal.pool.base.clock import Clock
from shoal.pool.head.granting import Granting
from shoal.pool.head.lease_requests import LeaseRequests
from shoal.pool.head.leases import LeaseRefused, LeaseTable
from shoal.pool.head.nodes import Nodes
from shoal.pool.head.requests import Requests, Route, Routes
from shoal.pool.head.session_ends import Client, Endings
from shoal.pool.wire import messages
from shoal.pool.wire.end_reasons import End, Why
from shoal.pool.wire.frames import Closed
from shoal.pool.wire.roles import Role


class ClientLink:
    def __init__(
        self,
        table: LeaseTable,
        nodes: Nodes,
        ends: Endings,
        granting: Granting,
        leases: LeaseRequests,
        clock: Clock,
    ) -> None:
        self._leases = leases
        self._table = table
        self._nodes = nodes
        self._ends = ends
        self._granting = granting
        self._clock = clock

    async def serve(self, client: Client, message: messages.FromClient, requests: Requests) -> None:
        """Answer a client's messages, from its first to its last."""
        try:
            while True:
                answer = await requests.answer(client, message)
                if answer is not None:
                    client.channel.send(answer)
                message = await client.receive(self._patience_s(client))
        except Closed:
            pass
        except (ShoalError, LeaseRefused) as error:  # what an event refuses, too
            client.channel.send(messages.refusal(str(error)))
        finally:
            client.forget()
            self._gone(client)

    def _patience_s(self, client: Client) -> float | None:
        if client.lease is None:
            return limits.IDLE_S
        # On one machine the kernel tells when a client ends; it may be stopped for as long as it likes.
        return None if client.channel.is_local else limits.LEASE_SILENCE_S

    # --- its messages ------------------------------------------------------------------------------

    def routes(self) -> Routes:
        return {
            messages.Describe: Route(Role.TASK, self._describe),
            messages.AskProfiles: Route(Role.TASK, self._ask_profiles),
            messages.AskLease: Route(Role.TASK, self._leases.lease),
            messages.Resume: Route(Role.TASK, self._resume),
            messages.Beat: Route(Role.TASK, self._beat),
            messages.LostSight: Route(Role.TASK, self._lost_sight),
            messages.Release: Route(Role.TASK, self._release),
        }

    async def _describe(self, client: Client, ask: messages.Describe) -> messages.PoolInfo:
        await self._granting.until_ready()
        return messages.PoolInfo(self._nodes.infos())

    async def _ask_profiles(self, client: Client, ask: messages.AskProfiles) -> messages.Profiles:
        return self._nodes.profiles_from(ask.first)

    async def _resume(self, client: Client, ask: messages.Resume) -> messages.FromHead:
        return self._granting.resume(client, ask)

    async def _beat(self, client: Client, beat: messages.Beat) -> messages.Beat:
        self._note_use(client, beat)
        return messages.Beat()

    async def _lost_sight(self, client: Client, message: messages.LostSight) -> None:
        self._ends.lost_sight(client, message)

    async def _release(self, client: Client, message: messages.Release) -> messages.Done:
        if client.lease is not None:
            self._ends.end_lease(client.lease, End(Why.GIVEN_BACK))
            client.lease = None
        return messages.Done()

    def _gone(self, client: Client) -> None:
        if client.lease is None:
            return
        if client.lease not in self._ends.holders:
            self._ends.correct(client.lease, End(Why.CLIENT_ENDED))
            return
        holder = self._ends.holders[client.lease]
        if holder.channel is not client.channel:
            return  # it came back on another connection already
        if client.channel.is_local:
            self._ends.end_lease(client.lease, End(Why.CLIENT_ENDED))
        else:
            # Devices that it has just closed its connection to, it lost by ending.
            self._ends.correct(client.lease, End(Why.CLIENT_ENDED))
            holder.channel = None
            holder.deadline = self._clock.monotonic() + limits.RESUME_S

    def _note_use(self, client: Client, beat: messages.Beat) -> None:
        granted = self._table.leases.get(client.lease) if client.lease is not None else None
        mine = {s.part for s in granted.shares} if granted else set()
        for use in beat.uses:
            if (use.device, use.session) in mine:
                self._ends.uses[use.device, use.session] = use
