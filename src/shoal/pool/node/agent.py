"""The agent of a node: starts a device server per device, watches them and speaks for them.

Device servers end with their agent. An agent that loses its head keeps its sessions running and
reconnects until the head is back. In an embedded pool the agent lives in the head's process, on a
socket pair, and does not restart a device server.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import assert_never

import shoal
from shoal.errors import ProtocolError
from shoal.pool.base import limits, paths, process
from shoal.pool.node.gpu_state import Gpus
from shoal.pool.node.measuring.profile_cache import ProfileCache
from shoal.pool.node.measuring.profiler import PROBE_EPOCH, Profiler
from shoal.pool.node.process_list import processes
from shoal.pool.node.server_process import Network, Server, start_server
from shoal.pool.node.shares.share_server import ShareServer, address_of
from shoal.pool.node.spec import DeviceSpec
from shoal.pool.wire import messages, node_messages, profile_messages, tls
from shoal.pool.wire.channel import Channel, open_channel
from shoal.pool.wire.frames import Closed
from shoal.schedule.model.device_profile import DeviceProfile

_log = logging.getLogger(__name__)


class Agent:
    def __init__(
        self,
        pool_id: str,
        node: str,
        specs: list[DeviceSpec],
        *,
        network: Network | None = None,
        restart: bool,
        profiles: ProfileCache | None = None,
    ) -> None:
        self.pool_id = pool_id
        self.node = node
        self.network = network
        self.restart = restart
        self.head: Channel | None = None
        self.on_ready: Callable[[], None] | None = None  # once: the head knows every device
        self.on_no_device: Callable[[str], None] | None = None  # once, with the reason
        self.shares = ShareServer(address_of(pool_id, node), self._grant_by_token)
        # In an embedded pool the node does not have a name: it is the only one.
        self.servers = [self._start(i, spec) for i, spec in enumerate(specs)]
        # Sessions that ended while there was no head to report to.
        self._ended: deque[node_messages.NodeSessionEnded] = deque(maxlen=limits.ENDED_PER_NODE_MAX)
        self._tasks: set[asyncio.Task[None]] = set()
        self._welcomed = False
        self._profiler: Profiler | None = None  # None: its devices are not measured
        if profiles is not None:
            self._profiler = Profiler(
                f"{pool_id}/{node}", profiles, lambda: self.servers, self._report_profile
            )

    def _start(self, index: int, spec: DeviceSpec) -> Server:
        return start_server(self.pool_id, self.node, index, spec, self.network)

    @property
    def starting(self) -> bool:
        return any(s.ready is None and not s.ended for s in self.servers)

    async def run(self, connect: Callable[[], Awaitable[Channel]], *, forever: bool) -> None:
        """Serve the head; with `forever`, also each head that follows it."""
        self.shares.start()
        for server in self.servers:
            self._spawn(self._watch(server))
        if self._profiler is not None:
            self._spawn(self._profiler.run())
        logged: object = None
        while True:
            pause_s = limits.RETRY_S
            try:
                channel = await connect()
                await self._speak(channel)
            except Closed:
                pass  # the head is away, and will be back
            except (OSError, ProtocolError) as error:
                cause, text = _refusal(error)
                if cause is not None:
                    pause_s = limits.REFUSED_S
                    if cause != logged:
                        logged = cause
                        _log.warning("%s", text)
            self.head = None
            if not forever:
                return
            await asyncio.sleep(pause_s)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- the head ----------------------------------------------------------------------------------

    async def _speak(self, channel: Channel) -> None:
        """Send what this node has, then serve the head as long as the connection lasts."""
        channel.send(self._hello())
        self._ended.clear()
        self.head = channel  # everything from now on is sent after the hello
        for server in self.servers:
            if server.ended:
                self._say(node_messages.DeviceDown(server.index, server.problem(), self.starting))
        patience_s: float | None = limits.HEAD_WELCOME_S
        beating: asyncio.Future[None] | None = None
        looking = asyncio.ensure_future(self._look_at_gpus(channel))
        try:
            while True:
                message = await channel.receive(node_messages.FROM_HEAD, patience_s)
                if isinstance(message, node_messages.NodeWelcome):
                    patience_s = limits.SILENCE_S if message.beat_s else None
                    beating = asyncio.ensure_future(self._beat(channel, message.beat_s))
                    self._welcomed = True
                    self._report_start()
                    if self._profiler is not None:
                        self._profiler.report_all()
                else:
                    self._hear(message)
        finally:
            looking.cancel()
            if beating is not None:
                beating.cancel()
            channel.abort()

    def _hello(self) -> node_messages.NodeHello:
        ready = [s for s in self.servers if s.ready is not None and not s.ended]
        held = [
            node_messages.HeldSession(s.index, g.session, g.lease, g.epoch)
            for s in ready
            for g in s.held.values()
        ]
        return node_messages.NodeHello(
            node=self.node,
            machine=paths.machine_id(),
            shoal=shoal.__version__,
            now=time.time(),
            starting=self.starting,
            declared=[s.spec.name for s in self.servers],
            devices=[s.announcement() for s in ready],
            held=held[: limits.SESSIONS_MAX],
            folders=list(self.network.data.folders) if self.network is not None else [],
            ended=list(self._ended),
        )

    async def _beat(self, channel: Channel, beat_s: float) -> None:
        found: list[messages.ProcessInfo] = []
        while beat_s > 0:
            channel.send(messages.Beat())
            said, found = found, processes(self.node, self.servers)
            if found != said:
                channel.send(node_messages.NodeProcesses(found))
            await asyncio.sleep(beat_s)

    async def _look_at_gpus(self, channel: Channel) -> None:
        """Report what the driver says of the devices, whenever it has changed."""
        gpus: Gpus | None = None
        said: dict[int, messages.GpuState | None] = {}
        while True:
            names = {s.index: s.ready.uuid for s in self.servers if s.ready and s.ready.uuid}
            if names and gpus is None:
                gpus = Gpus()
                if not await asyncio.to_thread(gpus.open):
                    return
            found = await asyncio.to_thread(gpus.look, names.values()) if gpus is not None else {}
            for index in said.keys() | names.keys():
                state = found.get(names.get(index, ""))
                if state != said.get(index):
                    channel.send(node_messages.NodeGpu(index, state))
                said[index] = state
            await asyncio.sleep(limits.GPU_LOOK_S)

    def _report_start(self) -> None:
        """Call `on_no_device` or `on_ready` once no device server is starting."""
        if self.starting:
            return
        if self.on_no_device is not None:
            on_no_device, self.on_no_device = self.on_no_device, None
            if all(s.ready is None for s in self.servers):
                on_no_device("; ".join(s.problem() for s in self.servers))
        if self._welcomed and self.on_ready is not None:
            on_ready, self.on_ready = self.on_ready, None
            on_ready()

    def _say(self, message: node_messages.FromNode) -> None:
        if self.head is not None:
            self.head.send(message)

    def _hear(self, message: node_messages.FromHead) -> None:
        match message:
            case messages.Beat() | node_messages.NodeWelcome():
                return
            case messages.Refusal(reason):
                raise ProtocolError(reason)
            case node_messages.NodeGrant(index, grant):
                server = self._server(index)
                if server is None:
                    return  # it has just ended, and the head hears of it
                if self._profiler is not None:
                    self._profiler.make_way(server)
                server.held[grant.session] = grant
                assert server.channel is not None
                server.channel.send(grant)
                self._say(node_messages.NodeGranted(index, grant.session, grant.epoch))
            case node_messages.NodeRevoke(index, session):
                server = self._server(index)
                if server is None:
                    return
                assert server.channel is not None
                server.channel.send(node_messages.Revoke(session))
                self._let_go(server, session)
                self._note_change()
            case node_messages.NodeOrderSession(index, order):
                server = self._server(index)
                if server is not None and server.channel is not None:
                    server.channel.send(order)
            case node_messages.NodeMeasure(indices):
                if self._profiler is not None:
                    self._profiler.refresh(set(indices))
            case _:
                assert_never(message)

    def _report_profile(self, index: int, profile: DeviceProfile) -> None:
        self._say(node_messages.DeviceMeasured(index, profile))

    def _note_change(self) -> None:
        if self._profiler is not None:
            self._profiler.changed()

    def _server(self, index: int) -> Server | None:
        if not 0 <= index < len(self.servers):
            raise ProtocolError(f"the head named device {index}; this node has {len(self.servers)}")
        server = self.servers[index]
        return server if server.ready is not None and not server.ended else None

    # --- device servers ----------------------------------------------------------------------------

    async def _watch(self, server: Server) -> None:
        """Serve a device server until it ends; then, if the agent restarts them, start it again.

        Give up one that was never ready: it would fail in the same way for ever.
        """
        backoff = process.Backoff()
        came_up = False
        while True:
            await self._hear_server(server)
            came_up = came_up or server.ready is not None
            lived_s = time.monotonic() - server.started
            delay_s = backoff.ended(server.ready is not None and lived_s > limits.WORKED_S)
            hopeless = bool(server.refusal) or backoff.failures >= limits.START_ATTEMPTS_MAX
            if not self.restart or (not came_up and hopeless):
                if self.restart or not came_up:  # else the program that uses it reports it
                    _log.error("%s", server.problem())
                return
            _log.warning("%s; the agent starts it again", server.problem())
            await asyncio.sleep(delay_s)
            server = await self._start_again(server)
            self.servers[server.index] = server

    async def _start_again(self, server: Server) -> Server:
        while True:
            try:
                return self._start(server.index, server.spec)
            except OSError as error:  # a worker that is just ending may hold the old socket
                _log.warning("cannot start device server %s: %s", server.spec.name, error)
                await asyncio.sleep(limits.RETRY_S)

    async def _hear_server(self, server: Server) -> None:
        server.channel = await open_channel(server.socket)
        try:
            while True:
                match await server.channel.receive(node_messages.FROM_SERVER, None):
                    case node_messages.Ready() as ready:
                        server.ready = ready
                        self._say(node_messages.DeviceUp(server.announcement(), self.starting))
                        self._report_start()
                        self._device_ready(server)
                    case profile_messages.SessionProfile() as profile:
                        if profile.epoch != PROBE_EPOCH:
                            self._say(node_messages.NodeSessionProfile(server.index, profile))
                    case node_messages.SessionEnded() as ended:
                        self._session_ended(server, ended)
                    case messages.Refusal(reason):
                        server.refusal = reason
        except ProtocolError:
            pass
        server.channel.abort()
        # It closes its descriptors a little before it ends.
        server.reaped = await asyncio.to_thread(server.reap)
        server.ended = True
        for session in list(server.held):
            self._let_go(server, session)
        self._say(node_messages.DeviceDown(server.index, server.problem(), self.starting))
        self._report_start()

    def _device_ready(self, server: Server) -> None:
        if self._profiler is None:
            return
        known = self._profiler.profile(server)
        if known is not None:
            self._report_profile(server.index, known)
        self._profiler.changed()

    def _session_ended(self, server: Server, message: node_messages.SessionEnded) -> None:
        if message.epoch == PROBE_EPOCH:
            return  # it was the agent's own
        held = server.held.get(message.session)
        if held is not None and held.epoch == message.epoch:
            self._let_go(server, message.session)
        self._note_change()
        ended = node_messages.NodeSessionEnded(
            server.index, message.session, message.epoch, message.end
        )
        if self.head is None:
            self._ended.append(ended)
        self._say(ended)

    # --- leases ------------------------------------------------------------------------------------

    def _grants(self) -> Iterator[node_messages.Grant]:
        return (grant for server in self.servers for grant in server.held.values())

    def _grant_by_token(self, token: str) -> node_messages.Grant | None:
        known = token.encode()
        found = (g for g in self._grants() if hmac.compare_digest(g.token.encode(), known))
        return next(found, None)

    def _let_go(self, server: Server, session: int) -> None:
        """End a grant. With the last grant of a lease on this node, its shared memory ends."""
        grant = server.held.pop(session, None)
        if grant is None:
            return
        if not any((g.lease, g.epoch) == (grant.lease, grant.epoch) for g in self._grants()):
            self.shares.lease_ended(grant.lease, grant.epoch)


def _refusal(error: Exception) -> tuple[object, str]:
    """Return the cause for which this node cannot use a head that is there, and its text.

    The cause is None for a head that is only away. Causes are compared, since a text may name a time.
    """
    problem = tls.certificate_problem(error)
    if problem is not None:
        return problem.cause, str(problem)
    if not isinstance(error, OSError):
        return str(error), f"the head refuses this node: {error}"
    reason = getattr(error, "verify_message", None)
    return reason, f"the head is not the one that this node joined: {reason}"
