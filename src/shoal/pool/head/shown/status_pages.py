"""A status in pages: an answer has a limit, and a pool may have more devices than fit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from shoal.pool.base import limits
from shoal.pool.head.requests import Route, Routes
from shoal.pool.head.session_ends import Client
from shoal.pool.wire.messages import AskStatus, PoolStatus
from shoal.pool.wire.roles import Role

_LISTS = ("nodes", "devices", "sessions", "processes")


class StatusPages:
    """Cuts statuses into pages. All pages of one version are of one moment.

    Args:
        make: returns the status of now.
    """

    def __init__(self, make: Callable[[], PoolStatus]) -> None:
        self._make = make
        self._version = 0
        self._kept: OrderedDict[int, PoolStatus] = OrderedDict()  # by version: those being read

    def routes(self) -> Routes:
        return {AskStatus: Route(Role.USER, self._ask)}

    async def _ask(self, client: Client, ask: AskStatus) -> PoolStatus:
        return self.page(ask.page, ask.version)

    def page(self, number: int, version: int) -> PoolStatus:
        """Return that page of that version; the first one of a new version if it is not there."""
        whole = self._kept.get(version)
        if whole is None or not 0 < number < _pages(whole):
            number, whole = 0, self._take()
        begin = number * limits.STATUS_ROWS_PER_PAGE
        end = begin + limits.STATUS_ROWS_PER_PAGE
        last = number + 1 >= _pages(whole)
        return msgspec.structs.replace(
            whole,
            **{name: getattr(whole, name)[begin:end] for name in _LISTS},
            page=number,
            following=None if last else number + 1,
        )

    def _take(self) -> PoolStatus:
        self._version += 1
        whole = msgspec.structs.replace(self._make(), version=self._version)
        if _pages(whole) > 1:
            self._kept[self._version] = whole
            while len(self._kept) > limits.STATUS_VERSIONS_KEPT:
                self._kept.popitem(last=False)
        return whole


def _pages(whole: PoolStatus) -> int:
    rows = max(len(getattr(whole, name)) for name in _LISTS)
    return max(1, -(-rows // limits.STATUS_ROWS_PER_PAGE))
