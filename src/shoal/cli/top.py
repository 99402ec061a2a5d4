"""`shoal top`: the pool live in the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from shoal.cli.common import ago, json_option, pool_option, pool_url, print_json
from shoal.cli.status import GPU_HEADS, gpu_cells, read_status
from shoal.errors import ShoalError
from shoal.pool.base import limits
from shoal.pool.wire import messages
from shoal.pool.wire.message_fields import SessionPart
from shoal.units import show_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


@dataclass(frozen=True)
class Rate:
    """What a session did per second on a device, between two refreshes."""

    calls: float = 0.0
    bytes_in: float = 0.0
    bytes_out: float = 0.0


def rates(before: messages.PoolStatus | None, now: messages.PoolStatus) -> dict[SessionPart, Rate]:
    """Return rates by device and session. A new session does not have one yet."""
    if before is None or now.now <= before.now:
        return {}
    seconds = now.now - before.now
    old = {(s.part, s.epoch): s.use for s in before.sessions if s.use is not None}
    found = {}
    for session in now.sessions:
        use, was = session.use, old.get((session.part, session.epoch))
        if use is not None and was is not None:
            found[session.part] = Rate(
                max(0, use.calls - was.calls) / seconds,
                max(0, use.bytes_in - was.bytes_in) / seconds,
                max(0, use.bytes_out - was.bytes_out) / seconds,
            )
    return found


@click.command()
@pool_option
@click.option(
    "--every", "every_s", default=1.0, show_default=True, help="Seconds between refreshes."
)
@click.option("--count", type=int, help="Refreshes before it ends. Default: until Ctrl-C.")
@json_option
def top(pool: str | None, every_s: float, count: int | None, as_json: bool) -> None:
    """Show devices, memory, calls and bytes per second, and sessions, live."""
    if every_s < limits.TOP_S_MIN:
        raise click.ClickException(
            f"--every must be at least {limits.TOP_S_MIN:g} s (got {every_s:g})"
        )
    url = pool_url(pool)
    if as_json:
        _print_lines(url, every_s, count)
        return
    from rich.live import Live

    before = None
    refreshes = 0
    with Live(auto_refresh=False, screen=count is None) as live:
        while count is None or refreshes < count:
            try:
                now = read_status(url)
                live.update(page(now, rates(before, now)), refresh=True)
                before = now
            except ShoalError as error:
                if before is None:
                    raise
                live.update(f"{error}\n\nwaiting for the head; Ctrl-C ends", refresh=True)
            refreshes += 1
            if count is None or refreshes < count:
                time.sleep(every_s)


def _print_lines(url: str, every_s: float, count: int | None) -> None:
    """Print one line of JSON for each refresh."""
    refreshes = 0
    while count is None or refreshes < count:
        print_json(read_status(url))
        refreshes += 1
        if count is None or refreshes < count:
            time.sleep(every_s)


def page(now: messages.PoolStatus, found: dict[SessionPart, Rate]) -> RenderableType:
    """Return a table of devices above one of sessions."""
    from rich.console import Group

    title = (
        f"pool {now.pool}: {len(now.devices)} devices, {len(now.sessions)} sessions, head up for "
        f"{ago(now.now - now.started)}"
    )
    rows = []
    for d in now.devices:
        mine = [found[s.part] for s in now.sessions if s.device == d.number and s.part in found]
        leased = d.memory_bytes - d.free_bytes
        rows.append([
            str(d.number), d.name, d.node, show_bytes(leased), show_bytes(d.memory_bytes),
            bar(leased / d.memory_bytes if d.memory_bytes else 0.0), str(d.sessions),
            f"{sum(r.calls for r in mine):,.0f}", show_bytes(sum(r.bytes_in for r in mine)),
            show_bytes(sum(r.bytes_out for r in mine)),
        ])  # fmt: skip
    device_heads: tuple[str, ...] = (
        "#",
        "device",
        "node",
        "leased",
        "of",
        "",
        "sessions",
        "calls/s",
        "in/s",
        "out/s",
    )
    if any(d.gpu for d in now.devices):
        device_heads += tuple(GPU_HEADS)
        for d, row in zip(now.devices, rows, strict=True):
            row += gpu_cells(d.gpu)
    devices = table(device_heads, rows, title)
    rows = [
        [
            str(s.session), s.client, s.program, str(s.device), show_bytes(s.granted_bytes),
            show_bytes(s.use.memory_bytes) if s.use else "-", ago(now.now - s.since),
            f"{found.get(s.part, Rate()).calls:,.0f}",
        ]
        for s in now.sessions
    ]  # fmt: skip
    heads = ("session", "client", "program", "#", "granted", "in use", "since", "calls/s")
    away = [f"node {n.name} is {n.state}" for n in now.nodes if n.state != "up"]
    return Group(devices, *away, "", table(heads, rows))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> Table:
    """Return a table without lines. A column of numbers is aligned right."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for index, head in enumerate(heads):
        numeric = all(row[index][:1].isdigit() or row[index] == "-" for row in rows)
        made.add_column(head, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def bar(part: float, width: int = 10) -> str:
    full = round(min(1.0, max(0.0, part)) * width)
    return "█" * full + "░" * (width - full)
