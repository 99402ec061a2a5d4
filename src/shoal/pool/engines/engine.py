"""What an engine does, and how one is found by its name.

An engine starts, places and restarts the head and the agents of a pool. No tensor, lease or heartbeat
passes through it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, cast

import msgspec

from shoal.errors import PoolError
from shoal.pool.base import paths
from shoal.pool.engines.placer import PerNode
from shoal.pool.local import agent_process, head_process, supervisor

FILE = "engine.json"  # in the state directory of a pool that another engine than `local` keeps
#: name -> module and class, and the extra that brings what the engine needs
ENGINES = {
    "local": ("shoal.pool.engines.local:LocalEngine", ""),
    "ray": ("shoal.pool.engines.ray_driver:RayEngine", "ray"),
}


class Plan(msgspec.Struct):
    """A pool as it shall run."""

    pool: str
    head: head_process.Options
    agent: agent_process.Options  # of each node; the engine fills in what differs between nodes
    beside: list[supervisor.Supervised] = []  # more processes on the head's machine
    per_node: PerNode = PerNode()
    insecure: bool = False  # also on an engine that takes orders from anybody who reaches it


class Placed(msgspec.Struct, frozen=True):
    """A part of a pool: a process that the engine keeps running."""

    part: str  # "head", "agent", "runner", …
    node: str
    pid: int  # 0: it does not run now
    since: float  # Unix time of its last start
    restarts: int = 0
    problem: str = ""  # why it does not run, or runs worse than it could


class NodeCame(msgspec.Struct, frozen=True, tag=True):
    node: str


class NodeWent(msgspec.Struct, frozen=True, tag=True):
    node: str


class PartStarted(msgspec.Struct, frozen=True, tag=True):
    placed: Placed


class PartEnded(msgspec.Struct, frozen=True, tag=True):
    placed: Placed


Event = NodeCame | NodeWent | PartStarted | PartEnded


class Shape(msgspec.Struct, frozen=True):
    """What a waiting request needs on one node."""

    devices: int
    kind: str = ""


class Engine(Protocol):
    def start(self, plan: Plan) -> None:
        """Start a pool. Return when its head and the first agent are ready."""

    def stop(self, pool: str) -> bool:
        """End a pool. Return when no process is left; False: it did not run."""

    def list(self, pool: str) -> list[Placed]:
        """Return the parts of a pool; empty: it does not run."""

    def watch(self, pool: str) -> Iterator[Event]:
        """Yield what changes, until the pool has ended."""

    def want(self, pool: str, shapes: Sequence[Shape], until: float) -> str:
        """Say what requests wait for, until that Unix time; an empty list takes it back. Return what
        the engine does about it; empty: nothing."""


class Chosen(msgspec.Struct, frozen=True):
    """The engine of a pool, as its state directory keeps it."""

    engine: str
    address: str = ""  # of the engine


def load(name: str, address: str = "") -> Engine:
    """Return the engine of that name. Raise PoolError with the line to type if it is not installed."""
    known = ENGINES.get(name)
    if known is None:
        raise PoolError(f"{name!r} is not an engine. There are: {', '.join(ENGINES)}")
    (module, _, attribute), extra = known[0].partition(":"), known[1]
    try:
        made = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if not extra or (error.name or "").startswith("shoal"):
            raise
        raise PoolError(
            f"the engine {name} needs {error.name}, which is not installed. Type: "
            f"pip install 'shoal[{extra}]'"
        ) from None
    return cast(Engine, made(address))


def choose(pool: str, chosen: Chosen) -> None:
    """Note which engine keeps a pool, for the commands that come later."""
    state = paths.state_directory(pool)
    paths.make_directory(state)
    paths.write_private(state / FILE, msgspec.json.encode(chosen).decode())


def chosen(pool: str) -> Chosen:
    """Return the engine of a pool on this machine."""
    path: Path = paths.state_directory(pool) / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Chosen)
    except FileNotFoundError:
        return Chosen("local")
    except (OSError, msgspec.DecodeError) as error:
        raise PoolError(f"{path} cannot be read: {error}. Type: rm {path}") from None


def of(pool: str) -> Engine:
    """Return the engine that keeps a pool."""
    known = chosen(pool)
    return load(known.engine, known.address)


def forget(pool: str) -> None:
    """Forget the engine of a pool that has ended."""
    (paths.state_directory(pool) / FILE).unlink(missing_ok=True)
