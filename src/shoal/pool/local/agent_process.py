"""The agent of a node, as a process of its own, which `shoal up` or `shoal node` keeps running."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from shoal.errors import ShoalError
from shoal.pool.base import limits, log, process
from shoal.pool.base.addresses import LOCAL_PREFIX
from shoal.pool.node.agent import Agent
from shoal.pool.node.measuring.profile_cache import ProfileCache
from shoal.pool.node.reader_process import ServedData
from shoal.pool.node.server_process import Network
from shoal.pool.node.spec import DeviceSpec, parse_device
from shoal.pool.wire import tls
from shoal.pool.wire.channel import Channel, connect_to_head


class Options(msgspec.Struct):
    pool_id: str  # of its sockets on this machine
    node: str
    devices: list[str] | None  # None: what the machine has
    identity: str = ""  # file; "": the node is not on the network
    host: str = ""  # at which its device servers listen
    port: int = 0  # of the first of them
    head: str = ""  # URL; "": on this machine
    data: ServedData = ServedData()  # for remote sessions
    profiles: str = ""  # file of the measured profiles; "": nothing is measured


def declared(devices: list[str] | None) -> list[DeviceSpec]:
    """Return the devices to offer. A child process finds the default: that needs torch."""
    if devices is None:
        found = subprocess.run(
            [sys.executable, "-c",
             "from shoal.pool.local.local_pool import default_devices; print(*default_devices())"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=limits.FIND_DEVICES_S,
            check=True,
        )  # fmt: skip
        devices = found.stdout.split()
    return [parse_device(text, number) for number, text in enumerate(devices)]


def connector(options: Options) -> Callable[[], Awaitable[Channel]]:
    """Return the function that connects this agent to its head."""
    if not options.head:
        return lambda: connect_to_head(LOCAL_PREFIX + options.pool_id, None)
    context = tls.client_context(tls.Identity.load(Path(options.identity)))
    return lambda: connect_to_head(options.head, context)


def give_up(reason: str) -> None:
    """Exit because no device came up. Device servers end with this process."""
    process.report_failure(reason)
    os._exit(1)


def main() -> None:
    """`python -m shoal.pool.local.agent_process OPTIONS_JSON`."""
    process.die_with_parent_thread()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    options = msgspec.json.decode(sys.argv[1], type=Options)
    log.set_up(f"agent[{options.node}]")
    try:
        network = None
        if options.identity and options.host:
            network = Network(options.host, options.port, Path(options.identity), options.data)
        specs = declared(options.devices)
        cache = ProfileCache.open(Path(options.profiles)) if options.profiles else None
        agent = Agent(
            options.pool_id, options.node, specs, network=network, restart=True, profiles=cache
        )
        agent.on_ready = process.report_ready
        agent.on_no_device = give_up
        asyncio.run(agent.run(connector(options), forever=True))
    except (ShoalError, OSError, subprocess.SubprocessError) as error:
        process.report_failure(process.start_problem(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
