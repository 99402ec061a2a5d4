"""Which nodes of an engine get an agent, and what it is called. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec


class EngineNode(msgspec.Struct, frozen=True):
    """A node that the engine has now."""

    id: str  # new each time the engine starts on that machine
    address: str
    host: str  # its name
    gpus: int = 0
    labels: dict[str, str] = {}


class PerNode(msgspec.Struct, frozen=True):
    """What the pool takes of each node."""

    gpus: int | None = 0  # None: all that the node has
    devices: tuple[str, ...] = ()  # CPU devices
    select: dict[str, str] = {}  # labels that a node must have


class Placement(msgspec.Struct, frozen=True):
    """An agent as it shall run."""

    node_id: str
    name: str
    address: str
    gpus: int
    devices: tuple[str, ...]


class Decision(msgspec.Struct, frozen=True):
    start: list[Placement]
    end: list[str]  # ids of nodes whose agent has no node any more
    names: dict[str, str]  # by address, to be kept
    without: dict[str, str]  # by host: why a node gets no agent


def decide(
    nodes: Sequence[EngineNode], agents: set[str], names: Mapping[str, str], per_node: PerNode
) -> Decision:
    """Return what to start and to end, where agents are on the nodes with these ids.

    A machine keeps its name, by its address. A new machine takes its host's name, which may be that of
    one that is gone: so a pod that moves comes back as the node that it was.
    """
    by_address: dict[str, EngineNode] = {}
    without: dict[str, str] = {}
    for node in sorted(nodes, key=lambda n: (n.id not in agents, n.id)):
        reason = _unfit(node, per_node)
        if not reason and node.address in by_address:
            reason = f"another Ray node with the address {node.address} has one"
        if reason:
            without[f"{node.host} ({node.address})"] = reason
        else:
            by_address[node.address] = node
    kept = _names(by_address, names)
    start = [
        Placement(
            node.id, kept[node.address], node.address, _gpus(node, per_node), per_node.devices
        )
        for node in by_address.values()
        if node.id not in agents
    ]
    alive = {node.id for node in by_address.values()}
    return Decision(start, sorted(agents - alive), kept, without)


def _gpus(node: EngineNode, per_node: PerNode) -> int:
    return node.gpus if per_node.gpus is None else per_node.gpus


def _unfit(node: EngineNode, per_node: PerNode) -> str:
    """Return why a node gets no agent; empty: it gets one."""
    for label, value in per_node.select.items():
        if node.labels.get(label) != value:
            return f"its label {label} is {node.labels.get(label, 'not set')}, not {value}"
    wanted = _gpus(node, per_node)
    if wanted > node.gpus:
        return f"it has {node.gpus} GPU(s), and --gpus asks for {wanted}"
    if not wanted and not per_node.devices:
        return "it has no GPU, and --device names no CPU device"
    return ""


def _names(nodes: Mapping[str, EngineNode], known: Mapping[str, str]) -> dict[str, str]:
    names = dict(known)
    taken: set[str] = set()
    for address in nodes:
        if address in names:
            taken.add(names[address])
    for address, node in nodes.items():
        if address in names:
            continue
        base = re.sub(r"[^a-z0-9-]+", "-", node.host.split(".")[0].lower()).strip("-")[:16]
        base = base or "node"
        number = 1
        while (name := base if number == 1 else f"{base}-{number}") in taken:
            number += 1
        for other in [a for a, n in names.items() if n == name]:
            del names[other]  # that machine is gone
        names[address] = name
        taken.add(name)
    return names
