"""`shoal devices`: what there is, what is free of it, and how fast it was measured to be."""

from __future__ import annotations

import time

import click
import msgspec

from shoal.cli.common import (
    ago,
    ask,
    json_option,
    pool_option,
    pool_url,
    print_json,
)  # fmt: skip
from shoal.cli.status import look, print_devices
from shoal.errors import PoolError
from shoal.pool.wire import messages
from shoal.schedule.model.device_profile import DeviceProfile
from shoal.units import show_bytes

POLL_S = 0.1

Profiles = dict[int, DeviceProfile]  # by device number


class ShownDevice(messages.DeviceInfo, frozen=True):
    """What `shoal devices --json` prints of each device."""

    profile: DeviceProfile | None = None  # None: not measured yet


@click.command()
@pool_option
@click.option("--profile", "whole", is_flag=True, help="Show all that was measured.")
@click.option("--refresh", is_flag=True, help="Measure the idle devices again first.")
@click.option("--timeout", "timeout_s", default=60.0, show_default=True, metavar="SECONDS",
              help="Of --refresh.")  # fmt: skip
@json_option
def devices(pool: str | None, whole: bool, refresh: bool, timeout_s: float, as_json: bool) -> None:
    """The pool's devices, what is free of them, and how fast they are.

    Speeds are measured while a device is idle, once for its hardware.
    """
    url = pool_url(pool)
    if refresh:
        _refresh(url, timeout_s)
    found, profiles = look(url), read_profiles(url)
    if as_json:
        print_json([_shown(d, profiles.get(d.number)) for d in found.devices])
    elif whole:
        for device in found.devices:
            _print_profile(device, profiles.get(device.number), found.now)
    else:
        print_devices(found.devices, profiles)


def read_profiles(url: str) -> Profiles:
    """Everything that the head knows, page by page."""
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
    """Waits until every device that nobody uses has been measured."""
    before = read_profiles(url)
    ask(url, messages.Measure(), messages.Done)
    deadline = time.monotonic() + timeout_s
    said: list[str] = []
    while True:
        found, profiles = look(url), read_profiles(url)
        old = [d for d in found.devices if profiles.get(d.number) == before.get(d.number)]
        used = {(d.node, d.device) for d in found.devices if d.sessions}
        idle = [d.name for d in old if (d.node, d.device) not in used]
        if not idle:
            break
        if time.monotonic() > deadline:
            raise PoolError(
                f"{', '.join(idle)}: not measured within {timeout_s:g} s. What went wrong is in the "
                "output of `shoal up`, or in `log` of its state directory."
            )
        if idle != said:
            said = idle
            click.echo(f"measuring {', '.join(idle)} …", err=True)
        time.sleep(POLL_S)
    for device in old:
        click.echo(f"{device.name} is in use; it is measured when it is idle", err=True)


def _print_profile(device: messages.DeviceInfo, profile: DeviceProfile | None, now: float) -> None:
    click.echo(f"{device.number}  {device.name} on {device.node or 'this machine'}: {device.kind}")
    if profile is None:
        click.echo("   not measured yet: it is, as soon as nobody uses it")
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
