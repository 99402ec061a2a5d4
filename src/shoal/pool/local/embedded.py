"""The process of an embedded pool: head and agent in one, gone with the program that started it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

import msgspec

from shoal.pool import home, process
from shoal.pool.agent import Agent
from shoal.pool.channel import Channel, Listener, open_channel
from shoal.pool.head import Head
from shoal.pool.spec import DeviceSpec
from shoal.pool.store import Store


async def serve(pool: str, owner_pidfd: int, listener: socket.socket, agent: Agent) -> None:
    """Runs until the owner's process ends."""
    head = Head(pool, Store(None), standing=False)
    ours, theirs = socket.socketpair()

    async def connect() -> Channel:
        return await open_channel(theirs)

    tasks = [
        asyncio.ensure_future(head.watch()),
        asyncio.ensure_future(Listener(listener, head.serve_local).run()),
        asyncio.ensure_future(head.serve_local(await open_channel(ours))),
        asyncio.ensure_future(agent.run(connect, forever=False)),
    ]
    owner_ended = asyncio.Event()
    # Readable from its end on: this is called in every turn then.
    asyncio.get_running_loop().add_reader(owner_pidfd, owner_ended.set)
    ended = asyncio.ensure_future(owner_ended.wait())
    await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)


def main() -> None:
    """`python -m shoal.pool.embedded POOL OWNER_PID SPECS_JSON`: started by `shoal.up`."""
    pool, owner, specs_text = sys.argv[1:4]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    specs = msgspec.json.decode(specs_text, type=list[DeviceSpec])
    owner_pidfd = process.watch(int(owner))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(home.socket_name(pool, "head"))
    listener.listen(64)
    agent = Agent(pool, "", specs, restart=False)
    os.write(1, b"ready\n")
    try:
        asyncio.run(serve(pool, owner_pidfd, listener, agent))
    finally:
        os._exit(0)  # device servers die with this process; nothing else is to be tidied up


if __name__ == "__main__":
    main()
