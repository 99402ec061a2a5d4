"""The web process's connections to the head, which ends those that are silent."""

from __future__ import annotations

import asyncio
import secrets
import socket

import pytest

from shoal.pool.base import paths
from shoal.pool.wire import messages
from shoal.pool.wire import people_messages as people
from shoal.pool.wire.channel import Channel, Listener
from shoal.web import head_connections
from shoal.web.head_connections import HeadConnections

SAID = "no whole message came in time"


@pytest.mark.parametrize("refuses", [True, False], ids=["silence", "restart"])
def test_a_connection_that_has_ended_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    """A head that ends a connection says why before: that is no answer to the next request."""
    if refuses:
        monkeypatch.setattr(head_connections, "IDLE_S", 0.0)

    async def scenario() -> None:
        served = 0
        ended = asyncio.Event()

        async def serve(channel: Channel) -> None:
            nonlocal served
            served += 1
            await channel.receive(messages.FROM_CLIENT, 10)
            channel.send(people.WebPerson(f"{served}", "", "full", 0.0))
            if refuses:
                channel.send(messages.refusal(SAID))
            await channel.close()
            ended.set()

        pool = f"test-{secrets.token_hex(4)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.bind(paths.socket_name(pool, "head"))
            sock.listen()
            sock.setblocking(False)
            Listener(sock, serve)
            head = HeadConnections(pool)
            for number in (1, 2, 3):
                answer = await head.send(people.WebWho(""))
                assert isinstance(answer, people.WebPerson)
                assert answer.name == f"{number}"
                async with asyncio.timeout(10):
                    await ended.wait()
                    while not refuses and not head._idle[-1][1].has_ended:
                        await asyncio.sleep(0.01)
                ended.clear()

    asyncio.run(scenario())
