"""`shoal status`, and the tables of devices and sessions."""

from __future__ import annotations

from collections.abc import Mapping

import click

from shoal.cli.common import (
    ago,
    json_option,
    naming_no_pool,
    pool_option,
    pool_url,
    print_json,
    print_table,
)
from shoal.pool.base import limits
from shoal.pool.client.head_connection import Connection
from shoal.pool.client.status import read
from shoal.pool.wire import messages
from shoal.schedule.model.device_profile import DeviceProfile
from shoal.units import show_bytes

GPU_HEADS = ["in use by all", "busy", "heat", "power"]
SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}


def read_status(url: str) -> messages.PoolStatus:
    """Return a pool's whole status."""
    with naming_no_pool(url), Connection(url, limits.COMMAND_ANSWER_S) as connection:
        return read(connection, limits.COMMAND_ANSWER_S)


@click.command()
@pool_option
@json_option
def status(pool: str | None, as_json: bool) -> None:
    """Show the pool, its nodes, devices and sessions."""
    found = read_status(pool_url(pool))
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
        if node.folders:
            click.echo(f"node {node.name} reads training data below {', '.join(node.folders)}")
    click.echo()
    print_devices(found.devices)
    if found.sessions:
        click.echo()
        print_sessions(found)


def print_devices(
    found: list[messages.DeviceInfo], profiles: Mapping[int, DeviceProfile] | None = None
) -> None:
    """Print a line for each device; with `profiles`, also its measured speed."""
    rows = [
        [
            str(d.number), d.name, d.node, d.kind, show_bytes(d.memory_bytes), show_bytes(d.free_bytes),
            str(d.sessions), f"{d.speed:g}", str(d.threads),
        ]
        for d in found
    ]  # fmt: skip
    heads = ["#", "device", "node", "kind", "memory", "free", "sessions", "speed", "threads"]
    if any(d.gpu for d in found):
        heads += GPU_HEADS
        for device, row in zip(found, rows, strict=True):
            row += gpu_cells(device.gpu)
    if profiles:
        dtypes = list(dict.fromkeys(t for p in profiles.values() for t in p.flops_per_s))
        heads += [*(f"{SHORT.get(t, t)} GFLOP/s" for t in dtypes), "GB/s", "host GB/s"]
        for device, row in zip(found, rows, strict=True):
            row += _speeds(profiles.get(device.number), dtypes)
    print_table(heads, rows)


def gpu_cells(gpu: messages.GpuState | None) -> list[str]:
    """Return what a GPU's driver says of it, as GPU_HEADS."""
    if gpu is None:
        return ["-"] * len(GPU_HEADS)
    watts = f"{gpu.watts:.0f}" if gpu.watts is not None else "-"
    return [
        f"{show_bytes(gpu.used_bytes)} of {show_bytes(gpu.total_bytes)}",
        f"{gpu.busy:.0%}" if gpu.busy is not None else "-",
        f"{gpu.celsius} °C" if gpu.celsius is not None else "-",
        f"{watts} of {gpu.watts_max:.0f} W" if gpu.watts_max is not None else f"{watts} W",
    ]


def _speeds(profile: DeviceProfile | None, dtypes: list[str]) -> list[str]:
    if profile is None:
        return ["-"] * (len(dtypes) + 2)
    figures = [profile.flops_per_s.get(t, 0.0) for t in dtypes]
    figures += [profile.bytes_per_s, profile.links.get("host", 0.0)]
    return [f"{figure / 1e9:.3g}" if figure else "-" for figure in figures]


def print_sessions(found: messages.PoolStatus) -> None:
    names = {d.number: d.name for d in found.devices}
    rows = [
        [
            str(s.session), s.client, s.program, names.get(s.device, str(s.device)),
            show_bytes(s.granted_bytes), show_bytes(s.use.memory_bytes) if s.use else "-",
            ago(found.now - s.since),
        ]
        for s in found.sessions
    ]  # fmt: skip
    print_table(["session", "client", "program", "device", "granted", "in use", "since"], rows)
