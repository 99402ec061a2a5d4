"""The process of an embedded pool: head and agent in one. It ends with the program that started it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys

import msgspec

from shoal.errors import describe
from shoal.pool.base import log, paths, process
from shoal.pool.head.head import Head
from shoal.pool.head.store import Store
from shoal.pool.node.agent import Agent
from shoal.pool.node.spec import DeviceSpec
from shoal.pool.wire.channel import Channel, Listener, open_channel


async def serve(pool: str, owner_pidfd: int, listener: socket.socket, agent: Agent) -> None:
    """Run until the owner's process ends."""
    head = Head(pool, Store(None), standing=False)
    ours, theirs = socket.socketpair()

    async def connect() -> Channel:
        return await open_channel(theirs)

    accepting = Listener(listener, head.serve_local)
    tasks = [
        asyncio.ensure_future(head.watch()),
        asyncio.ensure_future(head.serve_local(await open_channel(ours))),
        asyncio.ensure_future(agent.run(connect, forever=False)),
    ]
    owner_ended = asyncio.Event()
    # The descriptor stays readable after the end, so the loop may call this several times.
    asyncio.get_running_loop().add_reader(owner_pidfd, owner_ended.set)
    ended = asyncio.ensure_future(owner_ended.wait())
    await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
    del accepting


def main() -> None:
    """`python -m shoal.pool.local.embedded POOL OWNER_PID SPECS_JSON`: started by `shoal.up`."""
    pool, owner, specs_text = sys.argv[1:4]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log.set_up("pool")
    specs = msgspec.json.decode(specs_text, type=list[DeviceSpec])
    try:
        owner_pidfd = process.watch(int(owner))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(paths.socket_name(pool, "head"))
        listener.listen(64)
        agent = Agent(pool, "", specs, restart=False)
        process.report_ready()
        asyncio.run(serve(pool, owner_pidfd, listener, agent))
    except ProcessLookupError:
        pass  # the program has ended already
    except OSError as error:
        process.report_failure(describe(error))
    except Exception:
        logging.getLogger(__name__).exception("the program's pool ends: this is a bug in Shoal")
    finally:
        os._exit(0)  # device servers die with this process; nothing else needs cleaning up


if __name__ == "__main__":
    main()
