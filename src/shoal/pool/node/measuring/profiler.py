"""Measures a node's idle devices; only the agents of standing pools do.

A device is measured once for its hardware, by a process of its own (`probe.py`) that is a client of the
device server, with a grant that the agent makes. Leases come first: a grant for a device that is being
measured ends the measurement before it reaches the device server. CPU devices of one node share its
cores, so they are measured only while none of them is leased.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import logging
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from shoal.errors import ProtocolError
from shoal.pool.base import limits, paths, process
from shoal.pool.base.addresses import LOCAL_PREFIX
from shoal.pool.node.measuring.profile_cache import Link, ProfileCache
from shoal.pool.node.spec import DeviceSpec
from shoal.pool.wire import messages, node_messages
from shoal.pool.wire.channel import Channel, open_channel
from shoal.schedule.model.device_profile import DeviceProfile, identity_of

_log = logging.getLogger(__name__)

# No lease has epoch 0; the session number is free whenever the device is.
PROBE_EPOCH = 0
PROBE_SESSION = limits.SESSIONS_MAX

Position = Annotated[int, Meta(ge=0, lt=limits.DEVICES_PER_LEASE_MAX)]


class Job(msgspec.Struct, frozen=True):
    """Agent → probe."""

    url: str
    devices: int
    measure: list[Position]
    pairs: list[tuple[Position, Position]]  # source, target


class Found(msgspec.Struct, frozen=True):
    """Probe → agent, a line of JSON: a device's profile, a link's bandwidth, or what went wrong."""

    target: Position
    profile: DeviceProfile | None = None
    source: Position | None = None
    bytes_per_s: Annotated[float, Meta(ge=0, le=1e18)] = 0.0
    problem: Annotated[str, Meta(max_length=1000)] = ""


class Server(Protocol):
    """What this needs to know of a device server."""

    index: int
    spec: DeviceSpec
    address: str
    channel: Channel | None
    ready: node_messages.Ready | None
    ended: bool
    held: dict[int, node_messages.Grant]


@dataclass
class Plan:
    """What the next probe does: `measure` and `pairs` are positions in `servers`."""

    servers: list[Server]
    measure: list[int] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)


def identity(server: Server) -> str:
    """Identify the hardware behind a device server that is ready."""
    assert server.ready is not None
    spec, ready = server.spec, server.ready
    return identity_of(ready.hardware, spec.device, ready.threads, spec.speed, _torch_version())


@functools.cache
def _torch_version() -> str:
    """Without importing it: the agent stays small."""
    return importlib.metadata.version("torch")


def share_hardware(one: DeviceSpec, other: DeviceSpec) -> bool:
    """Return whether work on one of them slows the other down."""
    return one.device == other.device


def plan(servers: Sequence[Server], cache: ProfileCache, wanted: set[str]) -> Plan | None:
    """Return what to measure now: idle devices that are unknown or `wanted` (identities)."""
    up = [s for s in servers if s.ready is not None and not s.ended]
    busy = [s.spec for s in up if s.held]
    idle = [s for s in up if not any(share_hardware(s.spec, spec) for spec in busy)]
    found = Plan([])

    def position(server: Server) -> int:
        if server not in found.servers:
            found.servers.append(server)
        return found.servers.index(server)

    seen: set[str] = set()
    for server in idle:
        known = identity(server)
        if known not in seen and (known not in cache.profiles or known in wanted):
            seen.add(known)
            found.measure.append(position(server))
    linked = [s for s in up[: limits.LINKED_DEVICES_MAX] if s in idle]
    for source in linked:
        for target in linked:
            if source is not target and _link_key(source, target) not in cache.links:
                found.pairs.append((position(source), position(target)))
    del found.servers[limits.DEVICES_PER_LEASE_MAX :]
    count = len(found.servers)
    found.measure = [p for p in found.measure if p < count]
    found.pairs = [(s, t) for s, t in found.pairs if max(s, t) < count]
    return found if found.servers else None


def _link_key(source: Server, target: Server) -> tuple[str, str, str, str]:
    return source.spec.name, target.spec.name, identity(source), identity(target)


class Profiler:
    """Keeps the profiles of a node's devices, and tells `report` of each that is new."""

    def __init__(
        self,
        pool_id: str,
        cache: ProfileCache,
        servers: Callable[[], Sequence[Server]],
        report: Callable[[int, DeviceProfile], None],
    ) -> None:
        self._pool_id = pool_id
        self._cache = cache
        self._servers = servers
        self._report = report
        self._wanted: set[str] = set()
        self._failures = 0
        self._changed = asyncio.Event()
        self._quiet_from = 0.0  # monotonic
        self._plan: Plan | None = None  # of the probe that runs
        self._probe: asyncio.subprocess.Process | None = None

    def profile(self, server: Server) -> DeviceProfile | None:
        """Return the profile of a device, under its own name and with its own links."""
        if server.ready is None:
            return None
        mine = identity(server)
        known = self._cache.profiles.get(mine)
        if known is None:
            return None
        links = {
            link.source: link.bytes_per_s
            for link in self._cache.links.values()
            if (link.target, link.target_identity) == (server.spec.name, mine)
        }
        return msgspec.structs.replace(
            known,
            kind=server.ready.kind,
            memory_bytes=server.ready.memory_bytes,
            links={**known.links, **links},
            speed=server.spec.speed,
        )

    def report_all(self) -> None:
        for server in self._servers():
            known = self.profile(server)
            if known is not None and not server.ended:
                self._report(server.index, known)

    def refresh(self, indices: set[int]) -> None:
        """Have these devices measured again, when they are idle."""
        for server in self._servers():
            if server.index in indices and server.ready is not None:
                mine = identity(server)
                self._wanted.add(mine)
                for key in [k for k in self._cache.links if server.spec.name in k[:2]]:
                    del self._cache.links[key]
        self._failures = 0
        self._quiet_from = time.monotonic() - limits.PROFILE_QUIET_S
        self._changed.set()

    def changed(self) -> None:
        """Note that a device or a session came or went."""
        self._quiet_from = time.monotonic()
        self._changed.set()

    def make_way(self, server: Server) -> None:
        """Give up a measurement on the hardware of this device: a lease is about to start."""
        running = self._plan
        if running is not None and any(
            share_hardware(s.spec, server.spec) for s in running.servers
        ):
            self._stop(running)
        self.changed()

    def _stop(self, running: Plan) -> None:
        """End the probe. Later messages to the device servers find their devices free."""
        self._plan = None
        for server in running.servers:
            if server.channel is not None and not server.ended:
                server.channel.send(node_messages.Revoke(PROBE_SESSION))
        if self._probe is not None:
            with suppress(ProcessLookupError):
                self._probe.kill()

    # --- the work ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Measure devices, for as long as the agent lives."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._failures < limits.PROBE_ATTEMPTS_MAX:
                quiet_s = limits.PROFILE_QUIET_S - (time.monotonic() - self._quiet_from)
                if quiet_s > 0:
                    await asyncio.sleep(quiet_s)
                    continue
                following = plan(self._servers(), self._cache, self._wanted)
                if following is None:
                    break
                await self._measure(following)

    async def _measure(self, following: Plan) -> None:
        problem = ""
        self._plan = following
        try:
            async with asyncio.timeout(limits.PROBE_S):
                problem = await self._run_probe(following)
        except TimeoutError:
            problem = f"it took more than {limits.PROBE_S:g} s"
        except (OSError, ValueError, msgspec.MsgspecError, ProtocolError) as error:
            problem = str(error)
        interrupted = self._plan is None
        if not interrupted:
            self._stop(following)
        if self._probe is not None:
            await self._probe.wait()
            self._probe = None
        self._failures = self._failures + 1 if problem and not interrupted else 0
        if self._failures == limits.PROBE_ATTEMPTS_MAX:
            _log.warning("the devices could not be measured: %s", problem)

    async def _run_probe(self, following: Plan) -> str:
        """Start a probe, grant it the devices and keep its results. Return what went wrong."""
        probe_id = f"{self._pool_id}/probe-{secrets.token_hex(8)}"
        job = Job(
            LOCAL_PREFIX + probe_id, len(following.servers), following.measure, following.pairs
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(paths.socket_name(probe_id, "head"))
            listener.listen(1)
            listener.setblocking(False)
            self._probe = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "shoal.pool.node.measuring.probe",
                msgspec.json.encode(job).decode(), stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
                limit=limits.PROBE_LINE_BYTES_MAX,
            )  # fmt: skip
            if self._plan is not following:  # a lease came first
                self._probe.kill()
            granting = asyncio.ensure_future(self._grant(listener, following))
            try:
                return await self._hear(self._probe, following)
            finally:
                granting.cancel()
                with suppress(asyncio.CancelledError, OSError, ProtocolError):
                    (await granting).abort()

    async def _grant(self, listener: socket.socket, following: Plan) -> Channel:
        """Act as the probe's head: lease it the devices, by grants of the agent's own."""
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        process.check_same_user(sock)
        channel = await open_channel(sock)
        ask = await channel.receive(messages.FROM_CLIENT, limits.FIRST_FRAME_S)
        while isinstance(ask, messages.Beat):  # whether a head is there
            channel.send(messages.Beat())
            ask = await channel.receive(messages.FROM_CLIENT, limits.FIRST_FRAME_S)
        if self._plan is not following:
            channel.abort()
            raise ProtocolError("a lease came first")
        devices = []
        for server in following.servers:
            assert server.ready is not None
            assert server.channel is not None
            memory_bytes = min(limits.PROBE_MEMORY_BYTES, server.ready.memory_bytes)
            grant = node_messages.Grant(
                secrets.token_urlsafe(24), PROBE_SESSION, memory_bytes, epoch=PROBE_EPOCH
            )
            server.channel.send(grant)
            info = messages.DeviceInfo(
                server.index, server.spec.name, server.spec.device, memory_bytes, memory_bytes, 0,
                server.spec.speed, server.ready.threads,
            )  # fmt: skip
            devices.append(messages.GrantedDevice(info, server.address, grant.token, grant.session))
        channel.send(messages.Lease(0, PROBE_EPOCH, devices))
        return channel

    async def _hear(self, probe: asyncio.subprocess.Process, following: Plan) -> str:
        assert probe.stdout is not None
        problem = ""
        while line := await probe.stdout.readline():
            found = msgspec.json.decode(line, type=Found)
            if found.problem:
                problem = found.problem
            else:
                self._keep(found, following.servers)
        status = await probe.wait()
        return problem or (process.exit_reason(status) if status else "")

    def _keep(self, found: Found, servers: Sequence[Server]) -> None:
        """Keep a result in the cache, and report every device that it concerns."""
        target = servers[found.target]
        mine = identity(target)
        if found.profile is not None:
            self._wanted.discard(mine)
            self._cache.profiles[mine] = msgspec.structs.replace(found.profile, identity=mine)
        elif found.source is not None:
            source = servers[found.source]
            link = Link(*_link_key(source, target), found.bytes_per_s)
            self._cache.links[link.key] = link
        try:
            self._cache.save()
        except OSError as error:
            _log.warning("%s cannot be written: %s", self._cache.path, error)
        for server in self._servers():
            known = self.profile(server)
            same = server is target if found.profile is None else known and identity(server) == mine
            if known is not None and same and not server.ended:
                self._report(server.index, known)
