"""Reads a pool's status, page by page."""

from __future__ import annotations

import time
from typing import Protocol

import msgspec

from shoal.errors import LeaseError
from shoal.pool.base import limits
from shoal.pool.wire import messages


class Asks(Protocol):
    """The part of a `Connection` that this needs."""

    def ask(self, request: messages.FromClient, timeout_s: float) -> messages.FromHead: ...


def read(connection: Asks, timeout_s: float = limits.ANSWER_S) -> messages.PoolStatus:
    """Return the whole status, of one moment. Begin again if the head has forgotten that moment."""
    deadline = time.monotonic() + timeout_s
    found = _page(connection, messages.AskStatus(), timeout_s)
    while found.following is not None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise LeaseError(f"the pool's status did not come whole within {timeout_s:g} s")
        page = _page(connection, messages.AskStatus(found.following, found.version), left_s)
        if page.version != found.version:
            found = page  # the first one of a later moment
            continue
        found = msgspec.structs.replace(
            found,
            nodes=found.nodes + page.nodes,
            devices=found.devices + page.devices,
            sessions=found.sessions + page.sessions,
            processes=found.processes + page.processes,
            following=page.following,
        )
    return found


def _page(connection: Asks, ask: messages.AskStatus, timeout_s: float) -> messages.PoolStatus:
    page = connection.ask(ask, timeout_s)
    if not isinstance(page, messages.PoolStatus):
        raise LeaseError(f"the head answered {type(page).__name__} to AskStatus")
    return page
