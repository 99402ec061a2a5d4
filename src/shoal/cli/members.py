"""Access to a pool: `shoal join`, `code`, `clients`, `revoke` and `audit`."""

from __future__ import annotations

import time

import click

from shoal.cli.common import (
    ago,
    ask,
    govern,
    json_option,
    local_url,
    name_option,
    print_json,
    print_table,
)  # fmt: skip
from shoal.pool.base import limits, paths
from shoal.pool.base.addresses import address_for_others, own_name, split_address
from shoal.pool.wire import messages
from shoal.units import parse_bytes, show_bytes


@click.command()
@click.argument("invitation", metavar="CODE@HOST")
@click.option("--as", "wished", default=None, help="Name in the pool. Default: the host name.")
@json_option
def join(invitation: str, wished: str | None, as_json: bool) -> None:
    """Make this machine a client of a remote pool.

    Write one small file that only you can read. From then on device="shoal" means that pool.
    """
    from shoal.pool.client import joining

    made = joining.join(invitation, "client", wished or own_name(), paths.identity_file())
    if as_json:
        print_json({"name": made.name, "url": made.url, "identity": str(made.path)})
        return
    click.echo(f"joined {made.url} as {made.name}; the key is in {made.path}")
    click.echo('device="shoal" now means that pool. `shoal status` shows it.')


@click.command()
@click.option(
    "--node", is_flag=True, help="Make a code for a node (`shoal node --join`), not for a client."
)
@click.option(
    "--minutes",
    default=limits.CODE_TTL_S / 60,
    show_default=True,
    help="Minutes until the code expires.",
)
@click.option("--devices", type=int, help="Devices that its bearer may hold at once.")
@click.option("--memory", help="Memory that its bearer may hold at once, like 8GiB.")
@name_option
@json_option
def code(
    node: bool, minutes: float, devices: int | None, memory: str | None, name: str, as_json: bool
) -> None:
    """Print a code with which one client or node can join, once."""
    memory_bytes = parse_bytes(memory) if memory is not None else None
    if devices is not None and devices < 1:
        raise click.ClickException(f"--devices must be at least 1 (got {devices})")
    request = messages.MakeCode("node" if node else "client", minutes * 60, devices, memory_bytes)
    made = govern(name, request, messages.Code)
    status = ask(local_url(name), messages.AskStatus(), messages.PoolStatus)
    host, port = split_address(status.listen)
    verb = "shoal node --join" if node else "shoal join"
    line = f"{verb} {made.code}@{address_for_others(host, port)}"
    if as_json:
        print_json({"command": line, "code": made.code, "expires": made.expires})
    else:
        click.echo(line)
        click.echo(f"valid once, for {ago(made.expires - time.time())}", err=True)


@click.command()
@name_option
@json_option
def clients(name: str, as_json: bool) -> None:
    """List the clients and nodes of the pool."""
    found = govern(name, messages.ListClients(), messages.ClientList).clients
    if as_json:
        print_json(found)
        return
    now = time.time()
    rows = [
        [
            c.name, c.role, f"{ago(now - c.joined)} ago",
            "revoked" if c.revoked else f"for {ago(c.expires - now)}", str(c.leases),
            "-" if c.devices_max is None else str(c.devices_max),
            "-" if c.memory_bytes_max is None else show_bytes(c.memory_bytes_max),
        ]
        for c in found
    ]  # fmt: skip
    print_table(["name", "role", "joined", "valid", "leases", "devices", "memory"], rows)


@click.command()
@click.argument("who", metavar="NAME")
@name_option
@json_option
def revoke(who: str, name: str, as_json: bool) -> None:
    """Remove a client or node: its sessions end now, and its certificate is refused."""
    done = govern(name, messages.RevokeClient(who), messages.Done)
    if as_json:
        print_json({"revoked": who, "text": done.text})
    else:
        click.echo(done.text)


@click.command()
@click.option("--count", default=50, show_default=True, type=click.IntRange(1, 500),
              help="Number of events.")  # fmt: skip
@name_option
@json_option
def audit(count: int, name: str, as_json: bool) -> None:
    """List the pool's events, newest last."""
    found = govern(name, messages.ReadAudit(count), messages.AuditLog).entries
    if as_json:
        print_json(found)
        return
    for entry in found:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.at))
        click.echo(f"{at}  {entry.actor:16}  {entry.action:12}  {entry.detail}")
