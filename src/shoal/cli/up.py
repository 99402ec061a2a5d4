"""`shoal up` and `shoal down`."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import click
import msgspec

from shoal.cli import sandbox, starting
from shoal.cli.common import ask, json_option, local_url, name_option, print_json
from shoal.cli.engines import starting as on_engine
from shoal.cli.engines.starting import EngineOptions, engine_options
from shoal.cli.status import read_status
from shoal.errors import PoolError
from shoal.pool.base import limits, log, paths
from shoal.pool.base.addresses import (
    NETWORK_PREFIX,
    address_for_others,
    is_loopback,
    join_address,
    own_name,
    split_address,
)
from shoal.pool.base.folders import named
from shoal.pool.engines import engine as engines
from shoal.pool.engines.local import LocalEngine
from shoal.pool.local import agent_process, head_process, runner_process, supervisor
from shoal.pool.wire import messages
from shoal.tasks.rules import DEFAULT, RULES
from shoal.units import show_bytes
from shoal.web import options


class Started(msgspec.Struct):
    """The output of `shoal up --json`."""

    pool: str
    url: str
    join: str | None
    devices: list[messages.DeviceInfo]
    pid: int
    web: str | None = None  # address of the dashboard; `shoal open` signs in


@click.command()
@starting.device_option
@click.option("--listen", metavar="ADDRESS[:PORT]",
              help=f"Address for other machines. Default port: {limits.PORT}.")  # fmt: skip
@click.option("--rule", default=DEFAULT, show_default=True, type=click.Choice(list(RULES)),
              help="Who goes first among requests that wait.")  # fmt: skip
@click.option("--metrics", metavar="[ADDRESS:]PORT", help="Address of Prometheus metrics (HTTP).")
@starting.data_option
@starting.profile_option
@click.option("--tasks/--no-tasks", "tasks", default=None,
              help="Tasks on this machine: also programs of the pool's submitters, in a sandbox; or "
              "none. Default: those of this user.")  # fmt: skip
@click.option("--web", metavar="ADDRESS[:PORT]", default=f"127.0.0.1:{options.PORT}",
              help="Address of the dashboard. Beyond loopback: HTTPS, with --listen.")  # fmt: skip
@click.option("--no-web", is_flag=True, help="Start no dashboard.")
@engine_options
@name_option
@starting.detach_option
@starting.ready_option
@json_option
def up(
    devices: tuple[str, ...],
    listen: str | None,
    rule: str,
    metrics: str | None,
    folders: tuple[str, ...],
    profile: bool,
    tasks: bool | None,
    web: str,
    no_web: bool,
    engine: EngineOptions,
    name: str,
    detach: bool,
    ready_fd: int | None,
    as_json: bool,
) -> None:
    """Start a pool on this machine; Ctrl-C or `shoal down` ends it.

    \b
    shoal up
    shoal up --device cuda:0 --device cuda:1 --listen 10.0.0.1
    shoal up --engine ray --gpus all
    """
    if not engine.is_local:
        on_engine.start(
            name, engine, devices, listen, rule, profile, data=folders, metrics=metrics, tasks=tasks
        )
        _announce(name, None, as_json)
        return
    state = paths.state_directory(name)
    starting.check_devices(devices)
    served = named(folders)
    if served and listen is None:
        raise PoolError(
            "--data serves programs on other machines, which cannot connect; add --listen ADDRESS. "
            "Programs on this machine read their files themselves"
        )
    if detach:
        starting.detach(state)
        return
    lock = supervisor.Lock(state)
    log.set_up("supervisor")
    head = head_process.Options(pool=name, rule=rule, state=str(state))
    agent = agent_process.Options(
        pool_id=paths.local_pool_id(name), node=own_name(), devices=list(devices) or None,
        profiles=starting.profiles_file(state, profile),
    )  # fmt: skip
    if listen is not None:
        head.listen_host, head.listen_port = split_address(listen)
        agent.host, agent.port = head.listen_host, head.listen_port + 1
        agent.identity = str(_own_identity(state, name, agent.node))
        agent.data = starting.served_data(served)
    if metrics is not None:
        _set_metrics(head, metrics)
    if not as_json and sys.stderr.isatty():
        click.echo("starting the devices …", err=True)
    plan = engines.Plan(name, head, agent)
    if tasks is not False:
        plan.beside += _runners(state, head, agent, of_others=bool(tasks))
    address = None
    if not no_web:
        address, process = _web(state, head, web)
        plan.beside.append(process)
    watcher = LocalEngine().watcher(plan)
    starting.run(watcher, lambda: _announce(name, address, as_json, os.getpid()), ready_fd)
    del lock


def _runners(
    state: Path, head: head_process.Options, agent: agent_process.Options, *, of_others: bool
) -> list[supervisor.Supervised]:
    """Return the runner of this user's tasks, and that of other people's."""
    local = local_url(head.pool)
    run = runner_process.Options(f"owner@{agent.node}", local, str(state / "runner"))
    own = starting.supervised("runner", runner_process, run)
    if not of_others:
        return [own]
    if not head.listen_host:
        raise PoolError(
            "--tasks runs programs of others, who cannot join without --listen ADDRESS. Tasks of this "
            "user run without it"
        )
    where = address_for_others(head.listen_host, head.listen_port)
    host, port = split_address(where)
    network_url = NETWORK_PREFIX + join_address(host, port)
    return [own, *sandbox.runners(agent.node, local, state, network_url=network_url)]


def _set_metrics(head: head_process.Options, metrics: str) -> None:
    text = metrics if ":" in metrics else f"127.0.0.1:{metrics}"
    head.metrics_host, head.metrics_port = split_address(text)
    if not is_loopback(head.metrics_host) and not head.listen_host:
        raise PoolError("metrics for other machines need an identity; add --listen ADDRESS")


def _web(state: Path, head: head_process.Options, web: str) -> tuple[str, supervisor.Supervised]:
    """Return the address of the dashboard, and its process."""
    site, listener = _web_options(state, head, web)
    encoded = msgspec.json.encode(site).decode()
    one = supervisor.Supervised("web", "shoal.web.process", encoded, (listener.fileno(),))
    listener.detach()
    return options.address_of(site), one


def _web_options(
    state: Path, head: head_process.Options, web: str
) -> tuple[options.Options, socket.socket]:
    """Return what the web process needs to know, and the socket that it gets."""
    host, port = split_address(web, options.PORT)
    site = options.Options(head.pool, host, port)
    if head.listen_host:
        site.join_host = address_for_others(head.listen_host, head.listen_port)
    if not is_loopback(host) and not head.listen_host:
        raise PoolError("a dashboard for other machines needs an identity; add --listen ADDRESS")
    by_default = web == f"127.0.0.1:{options.PORT}"  # another pool may have it
    listener = options.listen(site, any_port=by_default)
    if not is_loopback(host):
        from shoal.pool.access.certificates import Authority

        names = [name for name, _ in map(split_address, options.names_of(site))]
        site.certificate = str(Authority.open(state, head.pool).web_certificate(state, names))
    return site, listener


def _own_identity(state: Path, pool: str, node: str) -> Path:
    """Return the file with the certificate of this machine's own device servers."""
    from shoal.pool.access.certificates import Authority

    return Authority.open(state, pool).own_identity(state, "node", node, time.time()).path


def _announce(name: str, web: str | None, as_json: bool, pid: int | None = None) -> None:
    """Print how programs use the pool, from this machine and from others. `pid` keeps it running; None:
    an engine does, and the head's process is named."""
    url = local_url(name)
    status = read_status(url)
    join = None
    if status.listen:
        code = ask(url, messages.MakeCode("user", limits.CODE_TTL_S), messages.Code)
        join = f"shoal join {code.code}@{address_for_others(*split_address(status.listen))}"
    if as_json:
        print_json(Started(name, url, join, status.devices, pid or status.pid, web))
        return
    listed = ", ".join(f"{d.name} ({show_bytes(d.memory_bytes)})" for d in status.devices) or "none"
    click.echo(f"pool {name} is up with: {listed}")
    for node in status.nodes:
        for failure in node.failures:
            click.echo(failure)
    click.echo(f"  on this machine    export SHOAL_POOL={url}")
    if join is None:
        click.echo("  on other machines  not yet: open it with `shoal up --listen ADDRESS`")
    else:
        click.echo(f"  on other machines  {join}")
        click.echo("The code is valid once, for ten minutes; `shoal code` prints another.")
        starting.show_qr(join)
    if web is not None:
        click.echo(f"  dashboard          {web}    sign in with: shoal open")
    click.echo("`shoal status` shows the pool; `shoal down` or Ctrl-C ends it.")


@click.command()
@name_option
@json_option
def down(name: str, as_json: bool) -> None:
    """End a pool or node on this machine. Its clients' sessions end."""
    ended = engines.of(name).stop(name)
    if as_json:
        print_json({"name": name, "ended": ended})
    elif ended:
        click.echo(f"{name} has ended")
    else:
        raise PoolError(f"nothing named {name} runs here. `shoal up` starts a pool.")
