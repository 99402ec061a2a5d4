"""`shoal node`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from shoal.cli import sandbox, starting
from shoal.cli.common import json_option, print_json
from shoal.errors import PoolError
from shoal.pool.base import limits, log, paths
from shoal.pool.base.addresses import NETWORK_PREFIX, address_towards, own_name, split_address
from shoal.pool.base.folders import named
from shoal.pool.client.head_connection import open_tls
from shoal.pool.local import agent_process, supervisor
from shoal.pool.wire import tls


@click.command()
@click.option(
    "--join", "invitation", metavar="CODE@HOST",
    help="Code and address that `shoal code --node` prints on the head's machine.",
)  # fmt: skip
@starting.device_option
@click.option(
    "--listen", metavar="ADDRESS[:PORT]",
    help="Address for clients. Default: this machine's address towards the head.",
)  # fmt: skip
@starting.data_option
@starting.profile_option
@click.option("--tasks/--no-tasks", default=False, show_default=True,
              help="Run programs of the pool's submitters here, in a sandbox.")  # fmt: skip
@click.option(
    "--name", default="node", show_default=True, help="Name of its state on this machine."
)
@click.option("--as", "wished", default=None, help="Name in the pool. Default: the host name.")
@starting.detach_option
@starting.ready_option
@json_option
def node(
    invitation: str | None,
    devices: tuple[str, ...],
    listen: str | None,
    folders: tuple[str, ...],
    profile: bool,
    tasks: bool,
    name: str,
    wished: str | None,
    detach: bool,
    ready_fd: int | None,
    as_json: bool,
) -> None:
    """Add this machine's devices to a remote pool; Ctrl-C or `shoal down --name node` ends it.

    The first time needs --join; after that the node knows its pool.

    \b
    shoal node --join CODE@HOST
    shoal node
    """
    state = paths.state_directory(name)
    starting.check_devices(devices)
    served = named(folders)
    if detach:
        starting.detach(state)
        return
    lock = supervisor.Lock(state)
    log.set_up("supervisor")
    identity = _identity(state / "node.pem", invitation, wished)
    _check_head(identity)
    head_host, head_port = split_address(identity.url.removeprefix(NETWORK_PREFIX))
    host, port = address_towards(head_host), head_port + 1
    if listen is not None:
        host, port = split_address(listen, head_port + 1)
    options = agent_process.Options(
        pool_id=f"{paths.local_pool_id(name)}-node", node=identity.name, devices=list(devices) or None,
        identity=str(identity.path), host=host, port=port, head=identity.url,
        data=starting.served_data(served), profiles=starting.profiles_file(state, profile),
    )  # fmt: skip

    processes = [starting.supervised("agent", agent_process, options)]
    if tasks:
        processes += sandbox.runners(
            identity.name, identity.url, state, identity=str(identity.path)
        )
    runs_tasks = len(processes) > 1

    def announce() -> None:
        if as_json:
            print_json(
                {
                    "node": identity.name, "pool": identity.url, "pid": os.getpid(),
                    "tasks": runs_tasks,
                }
            )  # fmt: skip
        else:
            also = ", and runs programs of its submitters" if runs_tasks else ""
            click.echo(f"node {identity.name} serves {identity.url}{also}")
            click.echo(f"`shoal down --name {name}` or Ctrl-C ends it.")

    starting.run(supervisor.Supervisor(processes, record=state), announce, ready_fd)
    del lock


def _identity(path: Path, invitation: str | None, wished: str | None) -> tls.Identity:
    if invitation is not None:
        from shoal.pool.client import joining

        return joining.join(invitation, "node", wished or own_name(), path)
    if not path.exists():
        raise PoolError(
            "this machine is not a node yet. Type `shoal code --node` on the head's machine, and here: "
            "shoal node --join CODE@HOST"
        )
    return tls.Identity.load(path)


def _check_head(identity: tls.Identity) -> None:
    """Raise if the head answers and this node could never use it. One that is away may come later."""
    host, port = split_address(identity.url.removeprefix(NETWORK_PREFIX))
    try:
        open_tls(host, port, identity, "head.shoal", limits.HANDSHAKE_S).close()
    except OSError as error:
        problem = tls.certificate_problem(error)
        if problem is not None:
            raise PoolError(f"this node cannot use {identity.url}: {problem}") from None
