"""Members of a pool: `shoal code`, `clients` and `revoke`."""

from __future__ import annotations

import time

import click

from shoal.cli.common import (
    ago,
    ask,
    govern,
    governed_option,
    joined_as_admin,
    json_option,
    local_url,
    print_json,
    print_table,
)  # fmt: skip
from shoal.cli.starting import show_qr
from shoal.pool.base import limits
from shoal.pool.base.addresses import NETWORK_PREFIX, address_for_others, split_address
from shoal.pool.client import head_connection
from shoal.pool.wire import messages, roles
from shoal.units import parse_bytes, show_bytes


@click.command()
@click.option(
    "--node", is_flag=True, help="Make a code for a node (`shoal node --join`), not for a client."
)
@click.option(
    "--role",
    type=click.Choice([role.value for role in roles.OF_CODES if role is not roles.Role.NODE]),
    help="What its bearer may do: lease devices and run tasks; as submitter also on nodes that run "
    "programs of others; as admin also govern. Default: user.",
)
@click.option(
    "--minutes",
    default=limits.CODE_TTL_S / 60,
    show_default=True,
    help="Minutes until the code expires.",
)
@click.option(
    "--devices",
    type=int,
    help="Most devices that its bearer may hold at once; 0: only what an event grants.",
)
@click.option("--memory", help="Most memory that its bearer may hold at once, like 8GiB.")
@governed_option
@json_option
def code(
    node: bool,
    role: str | None,
    minutes: float,
    devices: int | None,
    memory: str | None,
    name: str,
    as_json: bool,
) -> None:
    """Print a code with which one client or node can join, once."""
    memory_bytes = parse_bytes(memory) if memory is not None else None
    if devices is not None and devices < 0:
        raise click.ClickException(f"--devices must be at least 0 (got {devices})")
    if node and role is not None:
        raise click.UsageError("--node and --role exclude each other: a node only offers devices")
    asked = roles.Role.NODE if node else role or roles.Role.USER
    request = messages.MakeCode(asked, minutes * 60, devices, memory_bytes)
    made = govern(name, request, messages.Code)
    joined = head_connection.default_url() or ""
    if joined.startswith(NETWORK_PREFIX) and joined_as_admin():
        address = joined.removeprefix(NETWORK_PREFIX)
    else:
        status = ask(local_url(name), messages.AskStatus(), messages.PoolStatus)
        address = address_for_others(*split_address(status.listen))
    verb = "shoal node --join" if node else "shoal join"
    line = f"{verb} {made.code}@{address}"
    if as_json:
        print_json({"command": line, "code": made.code, "expires": made.expires})
    else:
        click.echo(line)
        show_qr(line)
        click.echo(f"valid once, for {ago(made.expires - time.time())}", err=True)


@click.command()
@governed_option
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
@governed_option
@json_option
def revoke(who: str, name: str, as_json: bool) -> None:
    """Remove a client or node: its sessions end now, and its certificate is refused."""
    done = govern(name, messages.RevokeClient(who), messages.Done)
    if as_json:
        print_json({"revoked": who, "text": done.text})
    else:
        click.echo(done.text)
