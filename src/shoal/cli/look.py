"""`shoal status` and `shoal devices`."""

from __future__ import annotations

import click

from shoal.cli.common import (
    ago,
    amount,
    ask,
    json_option,
    pool_option,
    pool_url,
    print_json,
    print_table,
)  # fmt: skip
from shoal.pool import messages


def look(url: str) -> messages.PoolStatus:
    return ask(url, messages.Look(), messages.PoolStatus)


@click.command()
@pool_option
@json_option
def status(pool: str | None, as_json: bool) -> None:
    """The pool, its nodes, devices and sessions."""
    found = look(pool_url(pool))
    if as_json:
        print_json(found)
        return
    up = sum(n.state == "up" for n in found.nodes)
    where = f"listening at {found.listen}" if found.listen else "on this machine only"
    click.echo(
        f"pool {found.pool}: {len(found.devices)} device(s) on {up} node(s), "
        f"{len(found.sessions)} session(s); {where}; head up for {ago(found.now - found.started)}"
    )
    for node in found.nodes:
        if node.state != "up":
            click.echo(f"node {node.name} is {node.state}, last heard {ago(node.last_beat_s)} ago")
        for failure in node.failures:
            click.echo(f"node {node.name}: {failure}")
    click.echo()
    print_devices(found.devices)
    if found.sessions:
        click.echo()
        print_sessions(found)


@click.command()
@pool_option
@json_option
def devices(pool: str | None, as_json: bool) -> None:
    """The pool's devices and what is free of them."""
    found = look(pool_url(pool)).devices
    if as_json:
        print_json(found)
    else:
        print_devices(found)


def print_devices(found: list[messages.DeviceInfo]) -> None:
    rows = [
        [
            str(d.number), d.name, d.node, d.kind, amount(d.memory_bytes), amount(d.free_bytes),
            str(d.sessions), f"{d.speed:g}", str(d.threads),
        ]
        for d in found
    ]  # fmt: skip
    heads = ["#", "device", "node", "kind", "memory", "free", "sessions", "speed", "threads"]
    print_table(heads, rows)


def print_sessions(found: messages.PoolStatus) -> None:
    names = {d.number: d.name for d in found.devices}
    rows = [
        [
            str(s.session), s.client, s.program, names.get(s.device, str(s.device)),
            amount(s.granted_bytes), amount(s.use.memory_bytes) if s.use else "-",
            ago(found.now - s.since),
        ]
        for s in found.sessions
    ]  # fmt: skip
    print_table(["session", "client", "program", "device", "granted", "in use", "since"], rows)
