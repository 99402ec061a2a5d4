"""`shoal runner`: runs this user's tasks on a machine that has joined a pool."""

from __future__ import annotations

import os

import click

from shoal.cli import starting
from shoal.cli.common import json_option, naming_no_pool, pool_option, pool_url, print_json
from shoal.errors import PoolError
from shoal.pool.base import limits, log, paths
from shoal.pool.base.addresses import LOCAL_PREFIX, own_name
from shoal.pool.client import head_connection
from shoal.pool.local import runner_process, supervisor
from shoal.pool.wire import tls


@click.command()
@pool_option
@click.option(
    "--name", default="runner", show_default=True, help="Name of its state on this machine."
)
@starting.detach_option
@starting.ready_option
@json_option
def runner(pool: str | None, name: str, detach: bool, ready_fd: int | None, as_json: bool) -> None:
    """Run your tasks on this machine, until Ctrl-C or `shoal down --name runner`.

    `shoal up` does that on its machine. Tasks start in the folder of their `shoal submit`.
    """
    state = paths.state_directory(name)
    if detach:
        starting.detach(state)
        return
    url = pool_url(pool)
    if url.startswith(LOCAL_PREFIX):  # a runner waits for a remote pool that is away
        with naming_no_pool(url):
            head_connection.Connection(url, limits.COMMAND_ANSWER_S).close()
    lock = supervisor.Lock(state)
    log.set_up("supervisor")
    options = options_for(url, state=str(state))

    def announce() -> None:
        if as_json:
            print_json({"runner": options.name, "pool": url, "pid": os.getpid()})
        else:
            click.echo(f"runner {options.name} serves {url}")
            click.echo(f"`shoal down --name {name}` or Ctrl-C ends it, and its tasks.")

    processes = [starting.supervised("runner", runner_process, options)]
    starting.run(supervisor.Supervisor(processes, record=state), announce, ready_fd)
    del lock


def options_for(url: str, state: str) -> runner_process.Options:
    """Return the options of a runner for this user's tasks."""
    if url.startswith(LOCAL_PREFIX):
        return runner_process.Options(f"owner@{own_name()}", url, state)
    identity = tls.default_identity()
    if identity is None or identity.url != url:
        raise PoolError(f"this machine has not joined {url}. Type: shoal join CODE@HOST")
    name = f"{identity.name}@{own_name()}"[:64]
    return runner_process.Options(name, url, state, str(identity.path))
