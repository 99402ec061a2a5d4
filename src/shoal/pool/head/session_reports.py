"""What device servers report of their sessions, and the head's orders to suspend them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shoal.pool.base.clock import Clock
from shoal.pool.base.limits import SESSIONS_MAX
from shoal.pool.head.leases import LeaseTable, Share
from shoal.pool.head.nodes import Node, Nodes
from shoal.pool.head.requests import Route, Routes
from shoal.pool.head.session_ends import Client
from shoal.pool.wire import messages, node_messages
from shoal.pool.wire.message_fields import SessionPart
from shoal.pool.wire.profile_messages import SessionProfile
from shoal.pool.wire.roles import Role


class SessionReports:
    """The last profile of each session that is leased."""

    def __init__(self, table: LeaseTable, nodes: Nodes, clock: Clock) -> None:
        self._table = table
        self._nodes = nodes
        self._clock = clock
        self._profiles: dict[SessionPart, SessionProfile] = {}
        self._most = SESSIONS_MAX  # above, those of ended sessions are forgotten
        self._heard: dict[SessionPart, float] = {}  # monotonic
        self.on_change: Callable[[], None] = lambda: None  # a session's state is another one

    def hear(self, node: Node, message: node_messages.NodeSessionProfile) -> None:
        """Keep a report, unless its session has ended or its device is not known."""
        number, profile = node.numbers.get(message.index), message.profile
        if number is None or not self._is_leased((number, profile.session), profile.epoch):
            return
        before = self._profiles.get((number, profile.session))
        self._profiles[number, profile.session] = profile
        self._heard[number, profile.session] = self._clock.monotonic()
        if before is None or before.state != profile.state:
            self.on_change()
        if len(self._profiles) > self._most:
            self._profiles = {
                part: one
                for part, one in self._profiles.items()
                if self._is_leased(part, one.epoch)
            }
            self._most = max(SESSIONS_MAX, 2 * len(self._profiles))
            self._heard = {part: self._heard[part] for part in self._profiles}

    def routes(self) -> Routes:
        return {
            messages.AskSessionProfile: Route(Role.ADMIN, self._ask_profile),
            messages.OrderLease: Route(Role.ADMIN, self._order_lease),
        }

    async def _ask_profile(self, client: Client, ask: messages.AskSessionProfile) -> SessionProfile:
        """Return the last profile of a session; an empty one if there is none yet."""
        found = self._profiles.get(ask.part)
        if found is None or not self._is_leased(ask.part, found.epoch):
            return SessionProfile(ask.part[1], 0, "")
        return found

    async def _order_lease(self, client: Client, ask: messages.OrderLease) -> messages.Done:
        return messages.Done(f"{self.order(ask.lease, ask.suspend)} session(s) are told")

    def _is_leased(self, part: SessionPart, epoch: int) -> bool:
        granted = self._table.leases.get(epoch)  # a lease is numbered by its first epoch
        return granted is not None and any(share.part == part for share in granted.shares)

    def of(self, share: Share, epoch: int) -> SessionProfile | None:
        found = self._profiles.get(share.part)
        return found if found is not None and found.epoch == epoch else None

    def heard_at(self, share: Share) -> float:
        """Return when a session's profile came (monotonic)."""
        return self._heard.get(share.part, 0.0)

    def shown(self, share: Share, epoch: int) -> SessionProfile | None:
        """Return the profile as status shows it, without its operators."""
        found = self.of(share, epoch)
        return msgspec.structs.replace(found, operators=[]) if found is not None else None

    def order(self, lease: int, suspend: bool) -> int:
        """Suspend the sessions of a lease in place, or let them go on. Return how many there are.

        Their next profiles say whether they could.
        """
        granted = self._table.leases.get(lease)
        if granted is None:
            return 0
        for share in granted.shares:
            self._nodes.order(
                share, node_messages.OrderSession(share.session, granted.epoch, suspend)
            )
        return len(granted.shares)
