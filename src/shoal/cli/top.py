"""`shoal top`: the pool live in the terminal."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from shoal.cli.common import ago, json_option, pool_option, pool_url, print_json
from shoal.cli.status import look
from shoal.errors import ShoalError
from shoal.pool.wire import messages
from shoal.pool.wire.message_fields import SessionPart
from shoal.units import show_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Rate:
    """What a session did a second on a device, between two looks."""

    calls: float = 0.0
    bytes_in: float = 0.0
    bytes_out: float = 0.0


def rates(before: messages.PoolStatus | None, now: messages.PoolStatus) -> dict[SessionPart, Rate]:
    """By device and session. A session that was not there before has none yet."""
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
@click.option("--every", "every_s", default=1.0, show_default=True, help="Seconds between looks.")
@click.option("--count", type=int, help="Looks, then end. Default: until Ctrl-C.")
@json_option
def top(pool: str | None, every_s: float, count: int | None, as_json: bool) -> None:
    """The pool live: devices, memory, calls and bytes a second, sessions."""
    if every_s < 0.1:
        raise click.ClickException("--every: a look every 0.1 s is the most")
    url = pool_url(pool)
    if as_json:
        _print_lines(url, every_s, count)
        return
    from rich.live import Live

    before = None
    looks = 0
    with Live(auto_refresh=False, screen=count is None) as live:
        while count is None or looks < count:
            try:
                now = look(url)
                live.update(page(now, rates(before, now)), refresh=True)
                before = now
            except ShoalError as error:
                if before is None:
                    raise
                live.update(f"{error}\n\nwaiting for the head; Ctrl-C ends", refresh=True)
            looks += 1
            if count is None or looks < count:
                time.sleep(every_s)


def _print_lines(url: str, every_s: float, count: int | None) -> None:
    """One line of JSON for each look."""
    looks = 0
    while count is None or looks < count:
        print_json(look(url))
        looks += 1
        if count is None or looks < count:
            time.sleep(every_s)


def page(now: messages.PoolStatus, found: dict[SessionPart, Rate]) -> RenderableType:
    """What is shown: a table of devices above one of sessions."""
    from rich.console import Group
    from rich.table import Table

    title = (
        f"pool {now.pool}: {len(now.devices)} devices, {len(now.sessions)} sessions, head up for "
        f"{ago(now.now - now.started)}"
    )
    devices = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for head in ("#", "device", "node", "leased", "of", "", "sessions", "calls/s", "in/s", "out/s"):
        devices.add_column(
            head, justify="left" if head in ("device", "node", "") else "right", no_wrap=True
        )
    for d in now.devices:
        mine = [found[s.part] for s in now.sessions if s.device == d.number and s.part in found]
        leased = d.memory_bytes - d.free_bytes
        devices.add_row(
            str(d.number), d.name, d.node, show_bytes(leased), show_bytes(d.memory_bytes),
            bar(leased / d.memory_bytes if d.memory_bytes else 0.0), str(d.sessions),
            f"{sum(r.calls for r in mine):,.0f}", show_bytes(sum(r.bytes_in for r in mine)),
            show_bytes(sum(r.bytes_out for r in mine)),
        )  # fmt: skip
    sessions = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("session", "client", "program", "#", "granted", "in use", "since", "calls/s"):
        sessions.add_column(
            head, justify="left" if head in ("client", "program") else "right", no_wrap=True
        )
    for s in now.sessions:
        rate = found.get(s.part, Rate())
        sessions.add_row(
            str(s.session), s.client, s.program, str(s.device), show_bytes(s.granted_bytes),
            show_bytes(s.use.memory_bytes) if s.use else "-", ago(now.now - s.since),
            f"{rate.calls:,.0f}",
        )  # fmt: skip
    away = [f"node {n.name} is {n.state}" for n in now.nodes if n.state != "up"]
    return Group(devices, *away, "", sessions)


def bar(part: float, width: int = 10) -> str:
    full = round(min(1.0, max(0.0, part)) * width)
    return "█" * full + "░" * (width - full)
