"""The feed: server-sent events that say which part of the pool has changed. It resumes.

One connection to the head serves all browsers. The events carry topics and no data, so they say the
same to everybody; a page then asks for what its person may see.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec

from shoal.errors import ProtocolError
from shoal.pool.wire import messages
from shoal.pool.wire import people_messages as people
from shoal.web.head_connections import HeadAway, HeadConnections, Refused

BEAT_S = 15.0
GATHER_S = 0.1  # changes that come together are told together
KEPT = 1000
READERS_MAX = 1000
WATCH_ANSWER_S = 30.0
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Reader:
    """One browser's feed."""

    token: str
    topics: dict[str, None] = field(default_factory=dict)  # waiting to be told, in order
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    signed_out: bool = False

    def tell(self, topics: list[str]) -> None:
        self.topics.update(dict.fromkeys(topics))
        self.wake.set()


class Feed:
    def __init__(self, head: HeadConnections, address: str) -> None:
        self._head = head
        self._address = address
        self._readers: set[Reader] = set()
        self._version = 0
        self._access = 0
        self._kept: deque[tuple[int, list[str]]] = deque(maxlen=KEPT)

    @property
    def readers(self) -> int:
        return len(self._readers)

    async def run(self) -> None:
        """Follow the head's changes, for ever."""
        while True:
            try:
                channel = await self._head.connect()
            except HeadAway:
                await asyncio.sleep(0.2)
                continue
            try:
                while True:
                    channel.send(people.WebWatch(self._version, self._address))
                    change = await channel.receive(messages.FROM_HEAD, WATCH_ANSWER_S)
                    if not isinstance(change, people.WebChange):
                        raise ProtocolError(f"the head answered {type(change).__name__}")
                    await self._hear(change)
                    await asyncio.sleep(GATHER_S)
            except ProtocolError as error:
                _log.info("the head does not answer: %s", error)
                self._tell(["head"])
            finally:
                channel.abort()
            await asyncio.sleep(0.2)

    async def _hear(self, change: people.WebChange) -> None:
        if change.version != self._version:
            self._version = change.version
            self._kept.append((change.version, change.topics))
            self._tell(change.topics)
        if change.access != self._access:
            self._access = change.access
            await asyncio.gather(*(self._check(reader) for reader in list(self._readers)))

    def _tell(self, topics: list[str]) -> None:
        for reader in self._readers:
            reader.tell(topics)

    async def _check(self, reader: Reader) -> None:
        """End the feed of somebody whose token is not good any more."""
        try:
            await self._head.send(people.WebWho(reader.token))
        except Refused:
            reader.signed_out = True
            reader.wake.set()
        except HeadAway:
            pass  # the next change checks again

    def _missed(self, last: str) -> list[str] | None:
        """Return the topics since an event's id; None if that is not known any more."""
        if not last.isdigit():
            return None
        version = int(last)
        if version == self._version:
            return []
        if not self._kept or version < self._kept[0][0] or version > self._version:
            return None
        return [topic for number, topics in self._kept if number > version for topic in topics]

    async def read(self, token: str, last: str) -> AsyncIterator[bytes]:
        """Yield the events of one browser, from its last one on."""
        reader = Reader(token)
        if len(self._readers) >= READERS_MAX:
            return
        self._readers.add(reader)
        try:
            missed = self._missed(last)
            yield b"retry: 500\n" + self._event(
                "reset" if missed is None else "hello", missed or []
            )
            while not reader.signed_out:
                try:
                    async with asyncio.timeout(BEAT_S):
                        await reader.wake.wait()
                except TimeoutError:
                    yield b": beat\n\n"
                    continue
                reader.wake.clear()
                topics, reader.topics = list(reader.topics), {}
                if topics:
                    yield self._event("change", topics)
            yield self._event("signed-out", [])
        finally:
            self._readers.discard(reader)

    def _event(self, name: str, topics: list[str]) -> bytes:
        data = msgspec.json.encode({"topics": topics})
        return b"id: %d\nevent: %s\ndata: %s\n\n" % (self._version, name.encode(), data)
