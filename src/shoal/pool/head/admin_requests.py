"""Answers requests of admins and the owner: members, codes, the audit log, measurements."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shoal.errors import ProtocolError
from shoal.pool.base.clock import Clock
from shoal.pool.head.enrolment import Enrolment
from shoal.pool.head.nodes import Nodes
from shoal.pool.head.requests import Route, Routes
from shoal.pool.head.session_ends import Client
from shoal.pool.head.store import Store
from shoal.pool.wire import messages
from shoal.pool.wire.roles import Role


class AdminRequests:
    """Args:
    throw_out: ends everything of a revoked member, and says what that was.
    used_device_s: the device seconds that somebody has used, which fade.
    """

    def __init__(
        self,
        enrolment: Enrolment | None,
        nodes: Nodes,
        store: Store,
        throw_out: Callable[[str], str],
        used_device_s: Callable[[str, float], float],
        clock: Clock,
        *,
        standing: bool,
    ) -> None:
        self._enrolment = enrolment
        self._nodes = nodes
        self._store = store
        self._throw_out = throw_out
        self._used_device_s = used_device_s
        self._clock = clock
        self._standing = standing

    def routes(self) -> Routes:
        return {
            messages.ReadAudit: Route(Role.ADMIN, self._read_audit),
            messages.VerifyAudit: Route(Role.ADMIN, self._verify_audit),
            messages.Measure: Route(Role.ADMIN, self._measure),
            messages.MakeCode: Route(Role.ADMIN, self._make_code),
            messages.EnrolNode: Route(Role.OWNER, self._enrol_node),
            messages.ListClients: Route(Role.ADMIN, self._list_clients),
            messages.RevokeClient: Route(Role.ADMIN, self._revoke),
        }

    def _members(self) -> Enrolment:
        if self._enrolment is None:
            raise ProtocolError(
                "this pool is for this machine only. Open it with: shoal up --listen ADDRESS"
            )
        return self._enrolment

    async def _read_audit(self, client: Client, ask: messages.ReadAudit) -> messages.AuditLog:
        await self._store.flushed()
        rows = self._store.read_audit(ask.count)
        return messages.AuditLog([messages.AuditEntry(*row) for row in rows])

    async def _verify_audit(
        self, client: Client, ask: messages.VerifyAudit
    ) -> messages.AuditVerdict:
        await self._store.flushed()
        found = self._store.verify_audit(ask.noted)
        return messages.AuditVerdict(
            found.entries, found.unchained, found.wrong, found.last_hash, found.noted_found
        )

    async def _measure(self, client: Client, ask: messages.Measure) -> messages.Done:
        if not self._standing:
            raise ProtocolError(
                "the devices of a program's own pool are not measured. Start a pool with: shoal up"
            )
        numbers = None if ask.devices is None else set(ask.devices)
        return messages.Done(f"{self._nodes.measure(numbers)} device(s) will be measured")

    async def _make_code(self, client: Client, ask: messages.MakeCode) -> messages.Code:
        return await self._members().make_code(ask, client.principal)

    async def _enrol_node(self, client: Client, ask: messages.EnrolNode) -> messages.NodeEnrolled:
        return await self._members().enrol_node(ask)

    async def _list_clients(self, client: Client, ask: messages.ListClients) -> messages.ClientList:
        now = self._clock.now()
        listed = self._members().list().clients
        return messages.ClientList(
            [
                msgspec.structs.replace(one, used_device_s=self._used_device_s(one.name, now))
                for one in listed
            ]
        )

    async def _revoke(self, client: Client, ask: messages.RevokeClient) -> messages.Done:
        self._members().revoke(ask.name, client.principal)
        text = self._throw_out(ask.name)
        await self._store.flushed()
        if self._store.unwritten:
            text += (
                f". This is not on the disk yet: {self._store.error}. The head writes it as soon as it "
                "can; do not stop the head before. Check the disk with: df"
            )
        return messages.Done(text)
