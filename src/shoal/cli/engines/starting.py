"""`shoal up --engine ENGINE`: its options, and how it starts a pool on that engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
import msgspec

from shoal.errors import PoolError
from shoal.pool.base import limits, log, paths
from shoal.pool.engines import engine as engines
from shoal.pool.engines.placer import PerNode
from shoal.pool.local import agent_process, head_process
from shoal.pool.node.spec import parse_device

Command = TypeVar("Command", bound=Callable[..., Any])


class EngineOptions(msgspec.Struct, frozen=True):
    """What a user types about the engine."""

    name: str
    address: str
    gpus: str
    select: tuple[str, ...]
    state: str
    insecure: bool

    @property
    def is_local(self) -> bool:
        return self.name == "local"


def engine_options(command: Command) -> Command:
    """Add the options, which the command gets as one argument `engine`."""

    @functools.wraps(command)
    def collected(**named: Any) -> Any:
        found = {key: named.pop(f"engine_{key}") for key in EngineOptions.__struct_fields__}
        return command(engine=EngineOptions(**found), **named)

    options = [
        click.option("--engine", "engine_name", default="local", show_default=True,
                     type=click.Choice(list(engines.ENGINES)),
                     help="What starts and restarts head and agents."),
        click.option("--address", "engine_address", default="", metavar="HOST:PORT",
                     help="Address of the engine. Default: $RAY_ADDRESS, else here."),
        click.option("--gpus", "engine_gpus", default="", metavar="N|all",
                     help="GPUs to take on each node. Default: all, or none with --device."),
        click.option("--select", "engine_select", multiple=True, metavar="LABEL=VALUE",
                     help="Only nodes with this label."),
        click.option("--state", "engine_state", default="", metavar="DIR",
                     help="Directory of the head's state, with --engine. Default: as without."),
        click.option("--insecure-engine", "engine_insecure", is_flag=True,
                     help="Accept an engine that takes orders from whoever reaches it."),
    ]  # fmt: skip
    made: Any = collected
    for option in reversed(options):
        made = option(made)
    return made  # type: ignore[no-any-return]


def start(
    name: str, chosen: EngineOptions, devices: Sequence[str], listen: str | None, rule: str,
    profile: bool, **unused: object,
) -> None:  # fmt: skip
    """Start a pool on an engine. Return when its head and the first agent are ready."""
    for option, value in unused.items():
        if value:
            raise PoolError(f"--{option} is for pools on one machine; leave it out with --engine")
    log.set_up("engine")
    engine = engines.load(chosen.name, chosen.address)
    state = paths.state_directory(name)
    paths.make_directory(state)
    engine.start(make_plan(name, chosen, devices, listen, rule, profile))


def make_plan(
    name: str, chosen: EngineOptions, devices: Sequence[str], listen: str | None, rule: str,
    profile: bool,
) -> engines.Plan:  # fmt: skip
    """Return the pool that these options mean."""
    for number, text in enumerate(devices):
        if parse_device(text, number).device != "cpu":
            raise PoolError(
                f"--device {text}: an engine gives GPUs by their number. Type --gpus N instead"
            )
    port = _port(listen)
    state = paths.state_directory(name)
    head = head_process.Options(
        pool=name, rule=rule, state=chosen.state or str(state), listen_port=port
    )
    agent = agent_process.Options(
        pool_id=f"{paths.local_pool_id(name)}-node", node="", devices=None, port=port + 1,
        profiles="yes" if profile else "",
    )  # fmt: skip
    per_node = PerNode(
        _gpus(chosen.gpus, devices), tuple(devices), dict(map(_label, chosen.select))
    )
    return engines.Plan(name, head, agent, per_node=per_node, insecure=chosen.insecure)


def _port(listen: str | None) -> int:
    """Return the port of --listen: the address is that of the engine's node."""
    if listen is None:
        return limits.PORT
    if not listen.isdecimal() or not 0 < int(listen) < 65535:
        raise PoolError(
            f"--listen {listen}: write a port alone. With --engine the head listens at the address by "
            "which the engine knows its machine"
        )
    return int(listen)


def _gpus(text: str, devices: Sequence[str]) -> int | None:
    if not text:
        return 0 if devices else None
    if text == "all":
        return None
    if not text.isdecimal() or int(text) > limits.DEVICES_PER_NODE_MAX:
        raise PoolError(f"--gpus {text}: write all, or 0 to {limits.DEVICES_PER_NODE_MAX}")
    return int(text)


def _label(text: str) -> tuple[str, str]:
    label, equals, value = text.partition("=")
    if not label or not equals:
        raise PoolError(f"--select {text}: write LABEL=VALUE")
    return label, value
