"""`shoal devices`: the pool's devices, their free memory and their measured speed."""

from __future__ import annotations

import time

import click
import msgspec

from shoal.cli.common import ago, ask, json_option, pool_option, pool_url, print_json
from shoal.cli.status import print_devices, read_status
from shoal.errors import PoolError
from shoal.pool.base import limits
from shoal.pool.wire import messages
from shoal.schedule.model.device_profile import DeviceProfile
from shoal.units import show_bytes

Profiles = dict[int, DeviceProfile]  # by device number


class ShownDevice(messages.DeviceInfo, frozen=True):
    """The output of `shoal devices --json` for each device."""

    profile: DeviceProfile | None = None  # None: not measured yet


@click.command()
@pool_option
@click.option("--profile", "whole", is_flag=True, help="Show every measured figure.")
@click.option("--refresh", is_flag=True, help="Measure the idle devices again first.")
@click.option("--timeout", "timeout_s", default=60.0, show_default=True, metavar="SECONDS",
              help="Seconds that --refresh waits.")  # fmt: skip
@json_option
def devices(pool: str | None, whole: bool, refresh: bool, timeout_s: float, as_json: bool) -> None:
    """List the pool's devices, their free memory and their speed.

    The pool measures a device while it is idle, once for its hardware.
    """
    url = pool_url(pool)
    if refresh:
        _refresh(url, timeout_s)
    found, profiles = read_status(url), read_profiles(url)
    if as_json:
        print_json([_shown(d, profiles.get(d.number)) for d in found.devices])
    elif whole:
        for device in found.devices:
            _print_profile(device, profiles.get(device.number), found.now)
    else:
        print_devices(found.devices, profiles)


def read_profiles(url: str) -> Profiles:
    """Return the profiles that the head knows, read page by page."""
    profiles: Profiles = {}
    first: int | None = 0
    while first is not None:
        page = ask(url, messages.AskProfiles(first), messages.Profiles)
        profiles |= {one.number: one.profile for one in page.devices}
        first = page.following
    return profiles


def _shown(device: messages.DeviceInfo, profile: DeviceProfile | None) -> ShownDevice:
    return ShownDevice(**msgspec.structs.asdict(device), profile=profile)


def _refresh(url: str, timeout_s: float) -> None:
    """Wait until the pool has measured every idle device."""
    before = read_profiles(url)
    ask(url, messages.Measure(), messages.Done)
    deadline = time.monotonic() + timeout_s
    printed: list[str] = []
    while True:
        found, profiles = read_status(url), read_profiles(url)
        old = [d for d in found.devices if profiles.get(d.number) == before.get(d.number)]
        used = {(d.node, d.device) for d in found.devices if d.sessions}
        idle = [d.name for d in old if (d.node, d.device) not in used]
        if not idle:
            break
        if time.monotonic() > deadline:
            raise PoolError(
                f"{', '.join(idle)}: not measured within {timeout_s:g} s. The output of `shoal up`, or "
                "`log` in its state directory, has the reason."
            )
        if idle != printed:
            printed = idle
            click.echo(f"measuring {', '.join(idle)} …", err=True)
        time.sleep(limits.REFRESH_POLL_S)
    for device in old:
        click.echo(f"{device.name} is in use; the pool measures it when it is idle", err=True)


def _print_profile(device: messages.DeviceInfo, profile: DeviceProfile | None, now: float) -> None:
    click.echo(f"{device.number}  {device.name} on {device.node or 'this machine'}: {device.kind}")
    if profile is None:
        click.echo("   not measured yet: the pool measures it when it is idle")
        return
    click.echo(f"   hardware   {profile.identity}")
    click.echo(
        f"   memory     {show_bytes(profile.memory_bytes)}, declared speed {profile.speed:g}; "
        f"measured {ago(now - profile.measured_at)} ago"
    )
    rows = [
        ("matrix product", name, f"{f / 1e9:.4g} GFLOP/s")
        for name, f in profile.flops_per_s.items()
    ]
    rows.append(("its memory", "copy", f"{profile.bytes_per_s / 1e9:.3g} GB/s"))
    rows.append(("a small call", "", f"{profile.call_s * 1e6:.3g} µs"))
    for source, rate in sorted(
        profile.links.items(), key=lambda link: (link[0] != "host", link[0])
    ):
        rows.append(("link", f"from {source}", f"{rate / 1e9:.3g} GB/s"))
    if profile.to_host_bytes_per_s:
        rows.append(("link", "to host", f"{profile.to_host_bytes_per_s / 1e9:.3g} GB/s"))
    width = max(len(name) for _, name, _ in rows)
    for what, name, figure in rows:
        click.echo(f"   {what:14}  {name:{width}}  {figure}")
