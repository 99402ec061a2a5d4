"""What the head does once a change is on the disk, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shoal.pool.base import limits
from shoal.pool.head.store import Store, StoreError


class Outbox:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._acts: list[Callable[[], None]] = []
        self._filled = asyncio.Event()

    def after_commit(self, act: Callable[[], None]) -> None:
        """Call `act` after the commit that contains what was queued at the store until now."""
        self._acts.append(act)
        self._filled.set()

    async def run(self) -> None:
        """Carry out what waits for a commit, for ever."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            acts, self._acts = self._acts, []
            try:
                await self._store.flushed()
            except StoreError:
                self._acts[:0] = acts
                await asyncio.sleep(limits.RETRY_S)
                self._filled.set()
                continue
            if self._store.unwritten:
                await asyncio.sleep(limits.RETRY_S)
            for act in acts:
                act()
