"""The web process's connections to the head. It sends each request with its person's token."""

from __future__ import annotations

import asyncio

import msgspec

from shoal.errors import ProtocolError
from shoal.pool.base import limits
from shoal.pool.base.addresses import LOCAL_PREFIX
from shoal.pool.wire import messages
from shoal.pool.wire import people_messages as people
from shoal.pool.wire.channel import Channel, connect_to_head

CONNECTIONS_MAX = 16
ANSWER_S = 10.0
IDLE_MAX = 4
IDLE_S = limits.IDLE_S / 4  # the head refuses a connection that is silent for all of it


class HeadAway(Exception):
    """The head does not answer now. It may be starting again."""


class Refused(Exception):
    """The head refuses a request; the text is its reason."""

    def __init__(self, refusal: messages.Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


class HeadConnections:
    def __init__(self, pool_id: str) -> None:
        self._url = LOCAL_PREFIX + pool_id
        self._idle: list[tuple[float, Channel]] = []  # since when; the last one is the newest
        self._room = asyncio.Semaphore(CONNECTIONS_MAX)

    async def connect(self) -> Channel:
        """Return a new connection to the head. Raise HeadAway if there is none."""
        try:
            channel = await connect_to_head(self._url, None)
        except (OSError, ProtocolError) as error:
            raise HeadAway(f"the head does not answer: {error}") from None
        channel.frame_bytes_max = limits.ANSWER_BYTES_MAX
        return channel

    def _take_idle(self) -> Channel | None:
        """Return a connection of before that still holds."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            since, channel = self._idle.pop()
            if now - since < IDLE_S and not channel.has_ended:
                return channel
            channel.abort()
        return None

    async def send(self, message: msgspec.Struct) -> messages.FromHead:
        """Send a message of the web process itself."""
        async with self._room:
            channel = self._take_idle() or await self.connect()
            try:
                channel.send(message)
                answer = await channel.receive(messages.FROM_HEAD, ANSWER_S)
            except ProtocolError as error:
                channel.abort()
                raise HeadAway(f"the head does not answer: {error}") from None
            except BaseException:  # its answer would be taken for the next one's
                channel.abort()
                raise
            if len(self._idle) < IDLE_MAX:
                self._idle.append((asyncio.get_running_loop().time(), channel))
            else:
                channel.hang_up()
        if isinstance(answer, messages.Refusal):
            raise Refused(answer)
        return answer

    async def ask(self, token: str, message: messages.FromClient) -> messages.FromHead:
        """Send what a person asks, with that person's token."""
        return await self.send(people.WebAsk(token, msgspec.msgpack.encode(message)))
