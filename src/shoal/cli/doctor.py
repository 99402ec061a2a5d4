"""`shoal doctor`: finds what is wrong with an installation or a connection, and says what to type."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import click
import msgspec

import shoal
from shoal.cli.common import ago, json_option, pool_option, pool_url, print_json
from shoal.errors import ShoalError
from shoal.pool import client, home, messages, tls

TORCH = "2.13.0"
CLOCK_S_MAX = (
    5.0  # certificates are backdated by an hour; a clock this wrong is a fault all the same
)
ROUND_TRIP_MS_SLOW = 5.0
CERTIFICATE_DAYS_LOW = 30
ANSWER_S = 5.0


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    what: str
    state: str  # "good", "note" or "bad"
    text: str
    help: str = ""  # what to type


def installation() -> Iterator[Finding]:
    """Versions of what must fit together."""
    python = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    yield Finding("python", "good" if good else "bad", python, "" if good else "Use 3.11 or later")
    yield Finding("shoal", "good", shoal.__version__)
    for package, wanted in (("torch", TORCH), ("cryptography", "")):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(
                package, "bad", "not installed", f"pip install {package}=={wanted or '*'}"
            )
            continue
        fits = found.split("+")[0] == wanted or not wanted
        yield Finding(
            package, "good" if fits else "bad", found, "" if fits else f"pip install torch=={TORCH}"
        )
    core = importlib.util.find_spec("shoal._core")
    yield Finding(
        "core", "good" if core else "bad", "compiled" if core else "the compiled core is missing",
        "" if core else "pip install --no-build-isolation .",
    )  # fmt: skip
    with open("/proc/sys/kernel/osrelease") as file:
        yield Finding("kernel", "good", f"{file.read().strip()}; {_kernel_tls()}")


def _kernel_tls() -> str:
    """Whether the kernel could encrypt. Shoal encrypts in the process either way (docs/network.md)."""
    try:
        with open("/proc/sys/net/ipv4/tcp_available_ulp") as file:
            there = "tls" in file.read().split()
    except OSError:
        there = False
    return "TLS in the process" + ("; the kernel has it too" if there else ", the kernel has none")


def identity() -> Iterator[Finding]:
    """The file that `shoal join` wrote."""
    path = home.identity_file()
    if not path.exists():
        yield Finding(
            "identity", "note", f"none at {path}", "shoal join CODE@HOST, to use a pool elsewhere"
        )
        return
    try:
        found = tls.Identity.load(path)
        from shoal.pool.identity import expiry_of

        days = (expiry_of(found.certificate) - time.time()) / 86400
    except (ShoalError, ValueError) as error:
        yield Finding("identity", "bad", str(error), "shoal join CODE@HOST")
        return
    state = "good" if days > CERTIFICATE_DAYS_LOW else "note" if days > 0 else "bad"
    text = f"{found.name} of {found.url}, good for {days:.0f} days"
    yield Finding("identity", state, text, "" if state == "good" else "shoal join CODE@HOST")


def connection(url: str) -> Iterator[Finding]:
    """The way to the head, and how it is."""
    yield Finding("pool", "good", f"{url} ({_why(url)})")
    if url.startswith(client.NETWORK_PREFIX):
        port = _port(url)
        yield port
        if port.state == "bad":
            return
    try:
        before = time.time()
        with client.Connection(url, ANSWER_S) as head:
            status = head.ask(messages.Look(), ANSWER_S)
            after = time.time()
            trips_s = [_round_trip_s(head) for _ in range(5)]
    except ShoalError as error:
        yield Finding("head", "bad", str(error), _reach_help(url))
        return
    assert isinstance(status, messages.PoolStatus)
    yield Finding("head", "good", f"answers; up for {ago(status.now - status.started)}")
    same = status.shoal == shoal.__version__
    yield Finding(
        "versions", "good" if same else "bad", f"shoal {shoal.__version__} here, {status.shoal} there",
        "" if same else f"pip install shoal=={status.shoal}",
    )  # fmt: skip
    off_s = max(before - status.now, status.now - after, 0.0)
    on_time = off_s <= CLOCK_S_MAX
    yield Finding(
        "clocks", "good" if on_time else "bad", f"within {off_s + after - before:.3f} s of the head's"
        if on_time else f"{off_s:.0f} s off the head's",
        "" if on_time else "timedatectl set-ntp true, on the machine whose clock is wrong",
    )  # fmt: skip
    trip_ms = statistics.median(trips_s) * 1e3
    slow = trip_ms > ROUND_TRIP_MS_SLOW
    yield Finding(
        "round trip", "note" if slow else "good", f"{trip_ms:.2f} ms",
        "every .item() waits this long; choose a nearer pool or read less often" if slow else "",
    )  # fmt: skip
    yield from _devices(status)


def _round_trip_s(head: client.Connection) -> float:
    begin = time.monotonic()
    head.ask(messages.Beat(), ANSWER_S)
    return time.monotonic() - begin


def _why(url: str) -> str:
    if os.environ.get("SHOAL_POOL") == url:
        return "from $SHOAL_POOL"
    return "joined" if url.startswith(client.NETWORK_PREFIX) else "on this machine"


def _port(url: str) -> Finding:
    host, port = client.split_address(url.removeprefix(client.NETWORK_PREFIX))
    begin = time.monotonic()
    try:
        socket.create_connection((host, port), timeout=ANSWER_S).close()
    except OSError as error:
        return Finding(
            "port", "bad", f"{client.join_address(host, port)}: {error}",
            f"on the head's machine: shoal status; from here: nc -vz {host} {port}",
        )  # fmt: skip
    took_ms = (time.monotonic() - begin) * 1e3
    return Finding("port", "good", f"{client.join_address(host, port)} answers in {took_ms:.1f} ms")


def _reach_help(url: str) -> str:
    if url.startswith(client.LOCAL_PREFIX):
        return "shoal up"
    return "shoal join CODE@HOST, with a new code of `shoal code`"


def _devices(status: messages.PoolStatus) -> Iterator[Finding]:
    for node in status.nodes:
        if node.state == "absent":
            text = f"{node.name} was last heard of {ago(node.last_beat_s)} ago"
            yield Finding("node", "bad", text, "shoal node, on that machine")
        if abs(node.clock_ahead_s) > CLOCK_S_MAX:
            text = f"{node.name}: its clock is {node.clock_ahead_s:+.0f} s off the head's"
            yield Finding("clocks", "bad", text, "timedatectl set-ntp true, on that machine")
        for failure in node.failures:
            yield Finding("node", "bad", f"{node.name}: {failure}", "look at the output there")
        if node.folders:
            text = f"{node.name} reads training data below {', '.join(node.folders)}"
            yield Finding("data", "good", text)
    found = len(status.devices)
    free = sum(d.free_bytes > 0 for d in status.devices)
    state = "good" if free else "note" if found else "bad"
    help_text = "" if free else "wait for a session to end: shoal status" if found else "shoal node"
    yield Finding("devices", state, f"{found}, {free} of them with free memory", help_text)


@click.command()
@pool_option
@json_option
def doctor(pool: str | None, as_json: bool) -> None:
    """Find what is wrong with an installation or connection, and what to type."""
    found: list[Finding] = []
    url = pool_url(pool)
    checks: list[Callable[[], Iterator[Finding]]] = [
        installation,
        identity,
        lambda: connection(url),
    ]
    for check in checks:
        for finding in check():
            found.append(finding)
            if not as_json:
                mark = {"good": "ok  ", "note": "note", "bad": "BAD "}[finding.state]
                click.echo(f"{mark}  {finding.what:12} {finding.text}")
                if finding.help:
                    click.echo(f"      {'':12} → {finding.help}")
    if as_json:
        print_json(found)
    if any(f.state == "bad" for f in found):
        raise SystemExit(1)
