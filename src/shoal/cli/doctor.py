"""`shoal doctor`: finds faults of an installation or a connection, and says what to type."""

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
import shoal_autoload
from shoal._constants import TORCH_VERSION
from shoal.cli.common import ago, json_option, local_url, pool_option, pool_url, print_json
from shoal.cli.engines import findings
from shoal.errors import ShoalError, describe
from shoal.pool.base import addresses, limits, paths
from shoal.pool.client import head_connection
from shoal.pool.client.status import read
from shoal.pool.wire import messages, tls
from shoal.units import show_bytes


class Finding(msgspec.Struct, frozen=True):
    """The result of one check."""

    what: str
    state: str  # "good", "note" or "bad"
    text: str
    help: str = ""  # what to type


def installation() -> Iterator[Finding]:
    """Check the versions of Shoal and what it needs."""
    python = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    yield Finding("python", "good" if good else "bad", python, "" if good else "Use 3.11 or later")
    yield Finding("shoal", "good", shoal.__version__)
    for package, wanted in (("torch", TORCH_VERSION), ("cryptography", "")):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(
                package, "bad", "not installed", f"pip install {package}=={wanted or '*'}"
            )
            continue
        fits = found.split("+")[0] == wanted or not wanted
        yield Finding(
            package,
            "good" if fits else "bad",
            found,
            "" if fits else f"pip install torch=={TORCH_VERSION}",
        )
    core = importlib.util.find_spec("shoal._core")
    yield Finding(
        "core", "good" if core else "bad", "compiled" if core else "the compiled core is missing",
        "" if core else "pip install --no-build-isolation .",
    )  # fmt: skip
    try:
        yield Finding("libssl", "good", str(tls.library().OPENSSL_VERSION))
    except tls.NoTls as error:
        yield Finding("libssl", "bad", error.problem, error.HELP)
    with open("/proc/sys/kernel/osrelease") as file:
        yield Finding("kernel", "good", f"{file.read().strip()}; {_kernel_tls()}")


def _kernel_tls() -> str:
    """Return whether the kernel has TLS. Shoal encrypts in the process either way (docs/network.md)."""
    try:
        with open("/proc/sys/net/ipv4/tcp_available_ulp") as file:
            available = "tls" in file.read().split()
    except OSError:
        available = False
    return "TLS in the process; the kernel " + ("has it, too" if available else "does not have it")


def device() -> Iterator[Finding]:
    """Check that torch knows the device, and which programs use it."""
    try:
        other = shoal_autoload.other_accelerator()  # imports torch, and registers the device
        import torch

        torch.device("shoal")
    except Exception as error:  # whatever keeps torch from its device
        yield Finding("device", "bad", describe(error), "python -m shoal_autoload shows all of it")
        return
    asked = shoal_autoload.asked()
    if asked:
        yield Finding("device", "good", f"programs use it unless they name another ({asked})")
        return
    if other:
        yield Finding(
            "device", "note", f"{other} is usable here, and no pool was asked for: torch knows the "
            "name shoal only in programs that import shoal",
            'import shoal, before device="shoal"; or: export SHOAL_DEFAULT=1',
        )  # fmt: skip
        return
    why = "SHOAL_DEFAULT=0" if shoal_autoload.declined() else "no pool was asked for"
    yield Finding("device", "good", f"only programs that name it use it ({why})")


def state() -> Iterator[Finding]:
    """Check the directory of a pool's files on this machine."""
    path = paths.state_directory("default")
    there = next(p for p in (path, *path.parents) if p.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        yield Finding("state", "good", str(path))
    else:
        yield Finding("state", "bad", f"{path} cannot be written", "export SHOAL_STATE=DIR")


def identity() -> Iterator[Finding]:
    """Check the file that `shoal join` wrote."""
    path = paths.identity_file()
    if not path.exists():
        yield Finding(
            "identity", "note", f"none at {path}", "shoal join CODE@HOST, to use a remote pool"
        )
        return
    try:
        found = tls.Identity.load(path)
        from shoal.pool.access.certificates import expiry_of

        days = (expiry_of(found.certificate) - time.time()) / 86400
    except (ShoalError, ValueError, ImportError) as error:
        yield Finding("identity", "bad", describe(error), "shoal join CODE@HOST")
        return
    state = "good" if days > limits.CERTIFICATE_DAYS_LOW else "note" if days > 0 else "bad"
    text = f"{found.name} of {found.url}, valid for {days:.0f} days"
    yield Finding("identity", state, text, "" if state == "good" else "shoal join CODE@HOST")


def pool_findings(named: str | None) -> Iterator[Finding]:
    """Check the pool that commands and programs use, if there is one."""
    try:
        chosen = head_connection.default_url()
    except ShoalError:
        return  # the identity is bad, which is reported above
    if named is None and chosen is None and not _runs_here():
        yield Finding(
            "pool", "note", "none: SHOAL_POOL is not set, none was joined, none runs on this machine",
            'shoal up, or shoal join CODE@HOST; without, device="shoal" starts one for its program',
        )  # fmt: skip
        return
    yield from connection(pool_url(named))


def _runs_here() -> bool:
    try:
        head_connection.Connection(local_url("default"), limits.DOCTOR_ANSWER_S).close()
    except ShoalError:
        return False
    return True


def connection(url: str) -> Iterator[Finding]:
    """Check the connection to the head, and the head."""
    if url.startswith(addresses.NETWORK_PREFIX):
        port = _port(url)
        yield port
        if port.state == "bad":
            return
    try:
        before = time.time()
        with head_connection.Connection(url, limits.DOCTOR_ANSWER_S) as head:
            status = read(head, limits.DOCTOR_ANSWER_S)
            after = time.time()
            trips_s = [_round_trip_s(head) for _ in range(5)]
    except ShoalError as error:
        problem = getattr(error, "problem", None)  # of a PoolUnreachable
        yield Finding("head", "bad", str(error), _reach_help(url, problem))
        return
    yield Finding("pool", "good", f"{url} ({_why(url)})")
    yield Finding("head", "good", f"answers; up for {ago(status.now - status.started)}")
    same = status.shoal == shoal.__version__
    yield Finding(
        "versions", "good" if same else "bad", f"shoal {shoal.__version__} here, {status.shoal} there",
        "" if same else f"install shoal {status.shoal}, as README.md says",
    )  # fmt: skip
    off_s = max(before - status.now, status.now - after, 0.0)
    on_time = off_s <= limits.CLOCK_S_MAX
    yield Finding(
        "clocks", "good" if on_time else "bad", f"within {off_s + after - before:.3f} s of the head's"
        if on_time else f"{off_s:.0f} s off the head's",
        "" if on_time else "timedatectl set-ntp true, on the machine whose clock is wrong",
    )  # fmt: skip
    trip_ms = statistics.median(trips_s) * 1e3
    slow = trip_ms > limits.ROUND_TRIP_MS_SLOW
    yield Finding(
        "round trip", "note" if slow else "good", f"{trip_ms:.2f} ms",
        "every .item() waits this long; choose a nearer pool or read less often" if slow else "",
    )  # fmt: skip
    yield _state(status.state)
    yield from _devices(status)
    for state, text, help_text in findings.findings(url):
        yield Finding("engine", state, text, help_text)


def _state(state: messages.StateInfo) -> Finding:
    """Report how the head keeps its state."""
    if state.error:
        text = f"the head cannot write its state: {state.error}"
        if state.unwritten:
            text += f"; {state.unwritten} change(s) wait, and are lost if the head ends"
        return Finding("state", "bad", text, "df, on the head's machine; make room there")
    if state.free_bytes is None:
        return Finding("state", "good", "in the head's memory: the pool ends with its program")
    free = show_bytes(state.free_bytes)
    if state.free_bytes < limits.STATE_FREE_BYTES_LOW:
        text = f"the disk of the head's state is full: {free} left"
        return Finding("state", "bad", text, "df, on the head's machine; make room there")
    if state.failed_writes:
        text = f"written, with {free} left; {state.failed_writes} write(s) failed before"
        return Finding("state", "note", text, "shoal audit, for what happened")
    return Finding("state", "good", f"written, with {free} left on the head's disk")


def _round_trip_s(head: head_connection.Connection) -> float:
    begin = time.monotonic()
    head.ask(messages.Beat(), limits.DOCTOR_ANSWER_S)
    return time.monotonic() - begin


def _why(url: str) -> str:
    if os.environ.get("SHOAL_POOL") == url:
        return "from $SHOAL_POOL"
    return "joined" if url.startswith(addresses.NETWORK_PREFIX) else "on this machine"


def _port(url: str) -> Finding:
    host, port = addresses.split_address(url.removeprefix(addresses.NETWORK_PREFIX))
    begin = time.monotonic()
    try:
        socket.create_connection((host, port), timeout=limits.DOCTOR_ANSWER_S).close()
    except OSError as error:
        return Finding(
            "port", "bad", f"{addresses.join_address(host, port)}: {error}",
            f"on the head's machine: shoal status; from here: nc -vz {host} {port}",
        )  # fmt: skip
    took_ms = (time.monotonic() - begin) * 1e3
    return Finding(
        "port", "good", f"{addresses.join_address(host, port)} answers in {took_ms:.1f} ms"
    )


def _reach_help(url: str, problem: tls.CertificateProblem | None) -> str:
    if problem is not None:
        return "timedatectl set-ntp true, on the machine whose clock is wrong"
    if url.startswith(addresses.LOCAL_PREFIX):
        return "shoal up"
    return "shoal join CODE@HOST, with a new code of `shoal code`"


def _devices(status: messages.PoolStatus) -> Iterator[Finding]:
    for node in status.nodes:
        if node.state in ("absent", "lost"):
            text = f"{node.name} is {node.state}, last heard {ago(node.last_beat_s)} ago"
            gone = f"; if it is gone for good: shoal revoke {node.name}"
            yield Finding("node", "bad", text, f"on that machine: shoal node{gone}")
        if abs(node.clock_ahead_s) > limits.CLOCK_S_MAX:
            text = f"{node.name}: its clock is {node.clock_ahead_s:+.0f} s off the head's"
            yield Finding("clocks", "bad", text, "timedatectl set-ntp true, on that machine")
        for failure in node.failures:
            yield Finding("node", "bad", f"{node.name}: {failure}", "read the output of that node")
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
    """Find faults of an installation or connection, and print what to type."""
    found: list[Finding] = []
    checks: list[Callable[[], Iterator[Finding]]] = [
        installation,
        device,
        state,
        identity,
        lambda: pool_findings(pool),
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
