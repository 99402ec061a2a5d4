"""The nodes of a pool as its head sees them: their devices, and which of them are silent."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from shoal.errors import ProtocolError
from shoal.pool.base import limits
from shoal.pool.head.leases import Held, LeaseTable, Lost, Share
from shoal.pool.head.store import Store
from shoal.pool.wire import messages, node_messages, tls
from shoal.pool.wire.channel import Channel
from shoal.pool.wire.end_reasons import End, Why
from shoal.schedule.model.device_profile import DeviceProfile


@dataclass
class Node:
    """A machine with devices. `channel` is None while it is silent and may come back."""

    name: str
    channel: Channel | None = None
    machine: str = ""
    host: str = ""  # where its device servers listen; "": where the head does
    starting: bool = True
    devices: dict[int, node_messages.NodeDevice] = field(
        default_factory=dict
    )  # by number in the pool
    numbers: dict[int, int] = field(default_factory=dict)  # its own index -> number in the pool
    failures: dict[int, str] = field(default_factory=dict)  # by its own index
    heard: float = 0.0  # monotonic
    clock_ahead_s: float = 0.0  # of the head's, when it said hello
    folders: list[str] = field(default_factory=list)  # that it serves
    processes: list[messages.ProcessInfo] = field(default_factory=list)

    def send(self, message: node_messages.FromHead) -> None:
        if self.channel is not None:
            self.channel.send(message)


class Nodes:
    """Keeps the lease table's devices as the agents report them."""

    def __init__(self, table: LeaseTable, store: Store) -> None:
        self.table = table
        self.store = store
        self.nodes: dict[str, Node] = {}
        self.lost: dict[str, float] = {}  # by name: when it was last heard (monotonic)
        self.profiles: dict[
            int, DeviceProfile
        ] = {}  # by number; agents report them after their hello
        self.gpus: dict[int, messages.GpuState] = {}  # by number
        self._infos: dict[int, tuple[int, messages.DeviceInfo]] = {}  # with the device's version

    def expect(self, numbers: set[int], served: float) -> None:
        """Expect the nodes of an earlier head's leases to come back; their silence counts from then."""
        for number, (node, _) in self.store.devices().items():
            if number in numbers:
                self.nodes.setdefault(node, Node(node, starting=False, heard=served))

    @property
    def starting(self) -> bool:
        return any(n.starting for n in self.nodes.values())

    def of_device(self, number: int) -> Node | None:
        known = self.table.devices.get(number)
        node = self.nodes.get(known.node) if known is not None else None
        return node if node is not None and number in node.devices else None

    # --- reports of agents -------------------------------------------------------------------------

    def hello(
        self, hello: node_messages.NodeHello, channel: Channel, now: float
    ) -> tuple[Node, list[Lost]]:
        """Take in a node that connects. Return what leases have lost meanwhile.

        Sessions that it holds and that are no longer leased are revoked first: their holders are late.
        """
        known = self.nodes.get(hello.node)
        if known is not None and known.channel is not None:
            if channel.is_local != known.channel.is_local:
                raise ProtocolError(
                    f"there is a node {hello.node} already. Join with another name: "
                    "shoal node --join CODE@HOST --as NAME"
                )
            known.channel.abort()  # the same node on a newer connection
        host = hello.host if channel.is_local else (hello.host or channel.address)
        node = Node(hello.node, channel, hello.machine, host, hello.starting, heard=now)
        node.folders = hello.folders
        self.nodes[hello.node] = node
        self.lost.pop(hello.node, None)
        if len(set(hello.declared)) < len(hello.declared):
            raise ProtocolError(
                f"node {hello.node} has two devices of one name. Name each: cpu,name=NAME"
            )
        for name in hello.declared:  # numbers follow the order in which devices were declared
            self.store.device_number(hello.node, name)
        for device in hello.devices:
            self._add(node, device)
        mine = self.store.numbers_of(hello.node)
        for number in mine:
            self.table.offered.touch(number)  # what is shown of it comes from this hello
        unnumbered = [h for h in hello.held if h.device not in node.numbers]
        held = [
            Held(node.numbers[h.device], h.session, h.lease, h.epoch)
            for h in hello.held
            if h.device in node.numbers
        ]
        late, lost = self.table.reconcile(mine, held)
        indices = {number: index for index, number in node.numbers.items()}
        for one in late:
            node.send(node_messages.NodeRevoke(indices[one.device], one.session))
        for other in unnumbered:
            node.send(node_messages.NodeRevoke(other.device, other.session))
        return node, lost

    def why_lost(self, node: Node, hello: node_messages.NodeHello, lost: Lost) -> End:
        """Return why a node does not have these shares any more. An agent tells what ended while it had
        no head; else it is a new agent, and the one before has ended."""
        parts = {s.part for s in lost.shares}
        for one in hello.ended:
            if (node.numbers.get(one.index), one.session) in parts:
                return one.end
        return End(Why.AGENT_ENDED, node.name)

    def _add(self, node: Node, device: node_messages.NodeDevice) -> int:
        number = self.store.device_number(node.name, device.name)
        node.devices[number] = device
        node.numbers[device.index] = number
        node.failures.pop(device.index, None)
        self.table.add_device(
            number, device.name, device.memory_bytes, device.kind, node.name, device.context_bytes,
            elastic=device.elastic,
        )  # fmt: skip
        return number

    def device_up(self, node: Node, message: node_messages.DeviceUp) -> list[Lost]:
        """Note that a device server is ready. Sessions of an earlier one are lost."""
        number = self._add(node, message.device)
        node.starting = message.starting
        return self.table.lose(self.table.shares_of(number))

    def device_down(self, node: Node, message: node_messages.DeviceDown) -> list[Lost]:
        node.starting = message.starting
        node.failures[message.index] = message.reason
        number = node.numbers.pop(message.index, None)
        if number is None:
            return []
        del node.devices[number]
        self.gpus.pop(number, None)
        return self.table.remove_device(number)

    def session_ended(self, node: Node, message: node_messages.NodeSessionEnded) -> list[Lost]:
        number = node.numbers.get(message.index)
        if number is None:
            return []
        return self.table.session_ended(number, message.session, message.epoch)

    def measured(self, node: Node, message: node_messages.DeviceMeasured) -> None:
        number = node.numbers.get(message.index)
        if number is not None:
            self.profiles[number] = message.profile

    def gpu_changed(self, node: Node, message: node_messages.NodeGpu) -> None:
        number = node.numbers.get(message.index)
        if number is not None and message.state is not None:
            self.gpus[number] = message.state
        elif number is not None:
            self.gpus.pop(number, None)

    # --- silence -----------------------------------------------------------------------------------

    def disconnected(self, node: Node, now: float) -> None:
        """Note that a node lost its connection. It has limits.SILENCE_S to come back."""
        if self.nodes.get(node.name) is not node:
            return  # there is a newer connection
        node.channel = None
        node.heard = min(node.heard, now) if node.heard else now
        node.starting = False
        for number in node.devices:
            self.table.absent(number)
            self.gpus.pop(number, None)

    def silent(self, now: float) -> list[Node]:
        """Return the nodes that have been silent for too long."""
        return [n for n in self.nodes.values() if now - n.heard > limits.SILENCE_S]

    def lose(self, node: Node) -> list[Lost]:
        """Remove a node and everything on it. It counts as lost until it is back."""
        self.lost[node.name] = node.heard
        while len(self.lost) > limits.LOST_NODES_MAX:
            del self.lost[next(iter(self.lost))]
        return self._remove(node)

    def forget(self, name: str) -> list[Lost]:
        """Remove a node that its owner revoked, present or lost."""
        self.lost.pop(name, None)
        node = self.nodes.get(name)
        return self._remove(node) if node is not None else []

    def _remove(self, node: Node) -> list[Lost]:
        if node.channel is not None:
            node.channel.abort()
            node.channel = None
        del self.nodes[node.name]
        mine = self.store.numbers_of(node.name)
        for number in mine:
            self.profiles.pop(number, None)
            self.gpus.pop(number, None)
            self._infos.pop(number, None)
        return [lost for number in sorted(mine) for lost in self.table.remove_device(number)]

    # --- instructions, and what to show ------------------------------------------------------------

    def endpoint(self, number: int) -> tuple[str, int] | None:
        """Return host and port of a device's server, if it is on the network; "": the head's host."""
        node = self.of_device(number)
        if node is None or number not in node.devices or not node.devices[number].port:
            return None
        return node.host, node.devices[number].port

    def grant(self, share: Share, grant: node_messages.Grant) -> messages.GrantedDevice | None:
        """Send a grant to the share's device server. Return None if its node has just gone."""
        node = self.of_device(share.device)
        if node is None or node.channel is None:
            return None
        device = node.devices[share.device]
        node.send(node_messages.NodeGrant(device.index, grant))
        info = msgspec.structs.replace(self.info(share.device), memory_bytes=grant.most_bytes)
        network = None
        if device.port:
            name = tls.server_name("node", node.name)
            network = messages.NetworkEndpoint(node.host, device.port, name)
        return messages.GrantedDevice(
            info, device.address, grant.token, share.session, node.machine, network
        )

    def revoke(self, share: Share) -> None:
        """End a session. A node that is away learns of it when it comes back."""
        node = self.of_device(share.device)
        if node is not None:
            node.send(node_messages.NodeRevoke(node.devices[share.device].index, share.session))

    def order(self, share: Share, order: node_messages.OrderSession) -> None:
        """Suspend or resume a session. A node that is away does not hear of it."""
        node = self.of_device(share.device)
        if node is not None:
            index = node.devices[share.device].index
            node.send(node_messages.NodeOrderSession(index, order))

    def measure(self, numbers: set[int] | None) -> int:
        """Have agents measure these devices (None: all) again. Return how many there are."""
        count = 0
        for node in self.nodes.values():
            indices = [i for i, n in node.numbers.items() if numbers is None or n in numbers]
            if indices and node.channel is not None:
                node.send(node_messages.NodeMeasure(sorted(indices)))
                count += len(indices)
        return count

    def profiles_from(self, first: int) -> messages.Profiles:
        """Return a page of the profiles of present devices."""
        known = sorted(n for n in self.profiles if n >= first and n in self.table.devices)
        page = [
            messages.MeasuredDevice(n, self.profiles[n]) for n in known[: limits.PROFILES_PER_PAGE]
        ]
        more = known[limits.PROFILES_PER_PAGE :]
        return messages.Profiles(page, more[0] if more else None)

    def info(self, number: int) -> messages.DeviceInfo:
        """Return what is shown of a device. It is made once for each change."""
        version = self.table.offered.versions.get(number, 0)
        made = self._infos.get(number)
        if made is None or made[0] != version:
            made = self._infos[number] = (version, self._info(number))
        gpu = self.gpus.get(number)  # changes all the time, and decides nothing
        return made[1] if gpu is None else msgspec.structs.replace(made[1], gpu=gpu)

    def _info(self, number: int) -> messages.DeviceInfo:
        known = self.table.devices[number]
        node = self.of_device(number)
        device = node.devices[number] if node is not None else None
        return messages.DeviceInfo(
            number=number,
            name=known.name,
            device=device.device if device else "",
            memory_bytes=known.memory_bytes,
            free_bytes=self.table.free_bytes(number) if known.present else 0,
            sessions=self.table.sessions(number),
            speed=device.speed if device else 1.0,
            threads=device.threads if device else 0,
            kind=known.kind,
            node=known.node,
            hardware=device.hardware if device else "",
            context_bytes=known.context_bytes,
            capability=device.capability if device else (0, 0),
        )

    def infos(self) -> list[messages.DeviceInfo]:
        return [self.info(n) for n in sorted(self.table.devices)]

    def node_infos(self, now: float) -> list[messages.NodeInfo]:
        return [
            messages.NodeInfo(
                n.name,
                ("starting" if n.starting else "up") if n.channel is not None else "absent",
                len(n.devices),
                max(0.0, now - n.heard),
                list(n.failures.values()),
                n.clock_ahead_s,
                n.folders,
            )
            for n in self.nodes.values()
        ] + [
            messages.NodeInfo(name, "lost", 0, max(0.0, now - heard))
            for name, heard in self.lost.items()
        ]

    def failures(self) -> list[str]:
        """Return why device servers do not run, for people who miss their devices."""
        return [reason for n in self.nodes.values() for reason in n.failures.values()]
