"""A device server, as its agent sees it: how it is started, and why it is not running."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from shoal.pool.base import addresses, limits, paths, process
from shoal.pool.node.reader_process import ServedData
from shoal.pool.node.spec import DeviceSpec
from shoal.pool.wire import node_messages
from shoal.pool.wire.channel import Channel


@dataclass(frozen=True)
class Network:
    """How remote clients reach the node's device servers."""

    host: str  # the address to listen at
    port: int  # of its first device server; the others' follow; where one is taken, any
    identity: Path  # of the node
    data: ServedData = field(default_factory=ServedData)


@dataclass
class Server:
    """A device server, as its agent sees it: a new object for each start."""

    index: int
    spec: DeviceSpec
    process: subprocess.Popen[bytes]
    socket: socket.socket
    address: str
    port: int
    started: float
    channel: Channel | None = None
    ready: node_messages.Ready | None = None
    ended: bool = False
    refusal: str = ""  # why it did not start, as it reported
    reaped: bool = True  # False: it closed its connection but did not exit; the agent killed it
    held: dict[int, node_messages.Grant] = field(default_factory=dict)  # by session

    def announcement(self) -> node_messages.NodeDevice:
        assert self.ready is not None
        return node_messages.NodeDevice(
            index=self.index,
            name=self.spec.name,
            device=self.spec.device,
            kind=self.ready.kind,
            memory_bytes=self.ready.memory_bytes,
            speed=self.spec.speed,
            threads=self.ready.threads,
            address=self.address,
            port=self.port,
            hardware=self.ready.hardware,
            context_bytes=self.ready.context_bytes,
            capability=self.ready.capability,
            elastic=self.ready.elastic,
        )

    def reap(self) -> bool:
        """Wait for a server that has hung up. Return False if this process had to kill it."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=limits.SERVER_EXIT_S)
            return True
        self.process.kill()
        self.process.wait()
        return False

    def problem(self) -> str:
        """Return why it is not running."""
        if self.refusal:
            return f"device server {self.spec.name} did not start: {self.refusal}"
        status = self.process.returncode
        if status is None or not self.reaped:
            reason = "it closed its connection to the agent"
        else:
            reason = process.exit_reason(status)
        return f"device server {self.spec.name} is not running: {reason}"


def start_server(
    pool_id: str, node: str, index: int, spec: DeviceSpec, network: Network | None
) -> Server:
    """Start a device server and open its sockets for it."""
    address = paths.socket_name(pool_id, f"{node}/device-{index}" if node else f"device-{index}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(64)
    ours, theirs = socket.socketpair()
    opened = [listener, theirs]
    arguments = [msgspec.json.encode(spec).decode(), str(listener.fileno()), str(theirs.fileno())]
    port = 0
    if network is not None:
        tls_listener = _listen(network, index)
        port = int(tls_listener.getsockname()[1])
        opened.append(tls_listener)
        data = msgspec.json.encode(network.data).decode()
        arguments += [str(tls_listener.fileno()), str(network.identity), data]
    child = subprocess.Popen(
        [sys.executable, "-m", "shoal.pool.node.device_server", *arguments],
        pass_fds=[s.fileno() for s in opened],
        stdin=subprocess.DEVNULL,
        stdout=2,  # the agent's own may be a pipe that nobody reads
    )
    for each in opened:
        each.close()
    return Server(index, spec, child, ours, address, port, time.monotonic())


def _listen(network: Network, index: int) -> socket.socket:
    family = addresses.family(network.host)
    with suppress(OSError):
        return socket.create_server((network.host, network.port + index), family=family, backlog=64)
    return socket.create_server((network.host, 0), family=family, backlog=64)
