"""`shoal up`, `shoal down` and `shoal node`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import click
import msgspec

from shoal.cli.common import (
    ask,
    json_option,
    local_url,
    name_option,
    print_json,
)  # fmt: skip
from shoal.errors import PoolError
from shoal.pool.base import limits, log, paths
from shoal.pool.base.folders import named
from shoal.pool.client.head_connection import NETWORK_PREFIX, join_address, open_tls, split_address
from shoal.pool.head.metrics import is_loopback
from shoal.pool.local import agent_process, head_process, supervisor
from shoal.pool.node import machine
from shoal.pool.node.agent import own_name
from shoal.pool.node.spec import parse_device
from shoal.pool.wire import messages, tls
from shoal.units import show_bytes

device_option = click.option(
    "--device", "devices", multiple=True, metavar="SPEC",
    help="One for each device, like cuda:0 or cpu,memory=1GiB,speed=0.5. Default: what there is.",
)  # fmt: skip
profile_option = click.option(
    "--profile/--no-profile", default=True, show_default=True,
    help="Measure how fast the devices are, while nobody uses them.",
)  # fmt: skip
data_option = click.option(
    "--data", "folders", multiple=True, metavar="DIR",
    help="A folder whose files trainings on this machine's devices may read. Default: none.",
)  # fmt: skip
detach_option = click.option("--detach", "-d", is_flag=True, help="Go on in the background.")


PROFILES = "profiles.json"  # in the state directory


class Told(msgspec.Struct):
    """What `shoal up --json` prints."""

    pool: str
    url: str
    join: str | None
    devices: list[messages.DeviceInfo]
    pid: int


@click.command()
@device_option
@click.option("--listen", metavar="ADDRESS[:PORT]",
              help=f"Open it to other machines. Port: {limits.PORT} if none is named.")  # fmt: skip
@click.option("--metrics", metavar="[ADDRESS:]PORT", help="Serve Prometheus metrics over HTTP.")
@data_option
@profile_option
@name_option
@detach_option
@json_option
def up(
    devices: tuple[str, ...],
    listen: str | None,
    metrics: str | None,
    folders: tuple[str, ...],
    profile: bool,
    name: str,
    detach: bool,
    as_json: bool,
) -> None:
    """Start a pool on this machine; Ctrl-C or `shoal down` ends it.

    \b
    shoal up
    shoal up --device cuda:0 --device cuda:1 --listen 10.0.0.1
    """
    state = paths.state_directory(name)
    _check(devices)
    served = named(folders)
    if served and listen is None:
        raise PoolError(
            "--data is for programs on other machines, and none can come; add --listen ADDRESS. Those "
            "on this machine read their files themselves"
        )
    if detach:
        _detach(state)
        return
    lock = supervisor.Lock(state)
    log.set_up("supervisor")
    head = head_process.Options(pool=name, state=str(state))
    agent = agent_process.Options(
        pool_id=paths.local_pool_id(name), node=own_name(), devices=list(devices) or None,
        profiles=str(state / PROFILES) if profile else "",
    )  # fmt: skip
    if listen is not None:
        head.listen_host, head.listen_port = split_address(listen)
        agent.host, agent.port = head.listen_host, head.listen_port + 1
        agent.identity = str(_own_identity(state, name, agent.node))
        agent.folders = served
    if metrics is not None:
        text = metrics if ":" in metrics else f"127.0.0.1:{metrics}"
        head.metrics_host, head.metrics_port = split_address(text)
        if not is_loopback(head.metrics_host) and listen is None:
            raise PoolError("metrics beyond this machine need an identity; add --listen ADDRESS")
    parts = [_part("head", head_process, head), _part("agent", agent_process, agent)]
    watcher = supervisor.Supervisor(parts)
    if not as_json and sys.stderr.isatty():
        click.echo("starting the devices …", err=True)
    try:
        watcher.start()
        _tell(name, head, as_json)
        watcher.run()
    finally:
        watcher.end()
        del lock


def _check(devices: tuple[str, ...]) -> None:
    """Raise for what cannot work now, rather than in another process."""
    log.check_settings()
    for warning in machine.check([parse_device(text, n) for n, text in enumerate(devices)]):
        click.echo(f"Warning: {warning}", err=True)


def _check_head(identity: tls.Identity) -> None:
    """Raise if the head is there and this node could never use it. One that is away may come later."""
    host, port = split_address(identity.url.removeprefix(NETWORK_PREFIX))
    try:
        open_tls(host, port, identity, "head.shoal", limits.HANDSHAKE_S).close()
    except OSError as error:
        problem = tls.certificate_problem(error)
        if problem is not None:
            raise PoolError(f"this node cannot use {identity.url}: {problem}") from None


def _part(name: str, module: object, options: msgspec.Struct) -> supervisor.Part:
    return supervisor.Part(name, module.__name__, msgspec.json.encode(options).decode())  # type: ignore[attr-defined]


def _own_identity(state: Path, pool: str, node: str) -> Path:
    """The certificate of this machine's own device servers."""
    from shoal.pool.access.identity import Authority

    return Authority.open(state, pool).own_identity(state, "node", node, time.time()).path


def _tell(name: str, head: head_process.Options, as_json: bool) -> None:
    """One line for use from here, one for use from elsewhere."""
    url = local_url(name)
    status = ask(url, messages.Look(), messages.PoolStatus)
    join = None
    if head.listen_host:
        code = ask(url, messages.MakeCode("client", limits.CODE_TTL_S), messages.Code)
        join = f"shoal join {code.code}@{address_for_others(head.listen_host, head.listen_port)}"
    if as_json:
        print_json(Told(name, url, join, status.devices, os.getpid()))
        return
    listed = ", ".join(f"{d.name} ({show_bytes(d.memory_bytes)})" for d in status.devices) or "none"
    click.echo(f"pool {name} is up with: {listed}")
    for node in status.nodes:
        for failure in node.failures:
            click.echo(failure)
    click.echo(f"  from here       export SHOAL_POOL={url}")
    if join is None:
        click.echo("  from elsewhere  not yet: open it with `shoal up --listen ADDRESS`")
    else:
        click.echo(f"  from elsewhere  {join}")
        click.echo("The code is good for one machine and ten minutes; `shoal code` prints another.")
    click.echo("`shoal status` looks at it, `shoal down` or Ctrl-C ends it.")


def address_for_others(host: str, port: int) -> str:
    """The address to name to others, also for a head that listens everywhere."""
    if host in ("0.0.0.0", "::"):
        host = _address_towards("192.0.2.1" if host == "0.0.0.0" else "2001:db8::1")
    return join_address(host, port) if port != limits.PORT or ":" in host else host


def _address_towards(host: str) -> str:
    """This machine's address on the way to `host`. No packet is sent."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _detach(state: Path) -> None:
    """Runs the same command in a process of its own, and says what it says until it is ready."""
    paths.make_directory(state)
    arguments = [a for a in sys.argv[1:] if a not in ("--detach", "-d")]
    log = state / "log"
    with open(log, "ab") as errors:
        os.chmod(log, 0o600)
        begin = errors.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", "shoal.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    assert child.stdout is not None
    told = b""
    while not told.endswith(LAST_LINES) and (line := child.stdout.readline()):
        told += line
    click.echo(told.decode(), nl=False)
    if not told.endswith(LAST_LINES):
        with open(log, "rb") as file:
            file.seek(begin)
            sys.stderr.write(file.read(8192).decode(errors="replace"))
        raise SystemExit(child.wait() or 1)
    click.echo(f"It runs in the background; what goes wrong is written to {log}.", err=True)


LAST_LINES = (b"ends it.\n", b"}\n")


@click.command()
@name_option
@json_option
def down(name: str, as_json: bool) -> None:
    """End a pool or node that runs on this machine. Its clients' sessions end."""
    ended = supervisor.stop(paths.state_directory(name))
    if as_json:
        print_json({"name": name, "ended": ended})
    elif ended:
        click.echo(f"{name} has ended")
    else:
        raise PoolError(f"nothing named {name} runs here. `shoal up` starts a pool.")


@click.command()
@click.option("--join", "invitation", metavar="CODE@HOST", help="From `shoal code --node` there.")
@device_option
@click.option("--listen", metavar="ADDRESS[:PORT]",
              help="Where clients reach its devices. Default: the way to the head.")  # fmt: skip
@data_option
@profile_option
@click.option("--name", default="node", show_default=True, help="Of its state on this machine.")
@click.option(
    "--as", "wished", default=None, help="What the pool calls it. Default: the host name."
)
@detach_option
@json_option
def node(
    invitation: str | None,
    devices: tuple[str, ...],
    listen: str | None,
    folders: tuple[str, ...],
    profile: bool,
    name: str,
    wished: str | None,
    detach: bool,
    as_json: bool,
) -> None:
    """Add this machine's devices to a pool elsewhere; Ctrl-C or `shoal down --name node` ends it.

    The first time with --join; after that it knows its pool.

    \b
    shoal node --join CODE@HOST
    shoal node
    """
    from shoal.pool.client import joining

    state = paths.state_directory(name)
    _check(devices)
    served = named(folders)
    if detach:
        _detach(state)
        return
    lock = supervisor.Lock(state)
    log.set_up("supervisor")
    path = state / "node.pem"
    if invitation is not None:
        identity = joining.join(invitation, "node", wished or own_name(), path)
    elif path.exists():
        identity = tls.Identity.load(path)
    else:
        raise PoolError(
            "this machine is no node yet. Type `shoal code --node` on the head's machine, and here: "
            "shoal node --join CODE@HOST"
        )
    _check_head(identity)
    head_host, head_port = split_address(identity.url.removeprefix(NETWORK_PREFIX))
    host, port = _address_towards(head_host), head_port + 1
    if listen is not None:
        host, port = split_address(listen, head_port + 1)
    options = agent_process.Options(
        pool_id=f"{paths.local_pool_id(name)}-node", node=identity.name, devices=list(devices) or None,
        identity=str(path), host=host, port=port, head=identity.url, folders=served,
        profiles=str(state / PROFILES) if profile else "",
    )  # fmt: skip
    watcher = supervisor.Supervisor([_part("agent", agent_process, options)])
    try:
        watcher.start()
        if as_json:
            print_json({"node": identity.name, "pool": identity.url, "pid": os.getpid()})
        else:
            click.echo(f"node {identity.name} serves {identity.url}")
            click.echo(f"`shoal down --name {name}` or Ctrl-C ends it.")
        watcher.run()
    finally:
        watcher.end()
        del lock
