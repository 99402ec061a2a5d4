"""What `shoal up` and `shoal node` share: options, checks, detaching, and running the processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import click
import msgspec

from shoal.pool.base import log, paths, process
from shoal.pool.local import supervisor
from shoal.pool.node import machine
from shoal.pool.node.reader_process import ServedData
from shoal.pool.node.spec import parse_device

device_option = click.option(
    "--device", "devices", multiple=True, metavar="SPEC",
    help="Device to offer, like cuda:0 or cpu,memory=1GiB,speed=0.5; once for each. Default: the "
    "machine's accelerators, else one CPU device.",
)  # fmt: skip
profile_option = click.option(
    "--profile/--no-profile", default=True, show_default=True,
    help="Measure the speed of idle devices.",
)  # fmt: skip
data_option = click.option(
    "--data", "folders", multiple=True, metavar="DIR",
    help="Folder that remote training programs may read through this machine's devices. "
    "Default: none.",
)  # fmt: skip
detach_option = click.option("--detach", "-d", is_flag=True, help="Run in the background.")
ready_option = click.option("--ready-fd", type=int, hidden=True)  # of the process that detaches

READER = "shoal.train.data.reader"  # reads the folders of --data, in a process of its own


def check_devices(devices: Sequence[str]) -> None:
    """Raise for devices and settings that cannot work now, rather than in another process."""
    log.check_settings()
    for warning in machine.check([parse_device(text, n) for n, text in enumerate(devices)]):
        click.echo(f"Warning: {warning}", err=True)


def served_data(folders: list[str]) -> ServedData:
    return ServedData(tuple(folders), READER if folders else "")


def show_qr(command: str) -> None:
    """Print the code of a `shoal join` command as a QR code, on a terminal only."""
    if sys.stdout.isatty():
        from shoal.people import qr

        click.echo(qr.terminal(command.rpartition(" ")[2]))


def profiles_file(state: Path, profile: bool) -> str:
    return str(state / "profiles.json") if profile else ""


def supervised(name: str, module: ModuleType, options: msgspec.Struct) -> supervisor.Supervised:
    return supervisor.Supervised(name, module.__name__, msgspec.json.encode(options).decode())


def run(watcher: supervisor.Supervisor, announce: Callable[[], None], ready_fd: int | None) -> None:
    """Keep processes running until a signal ends this one. Call `announce` once all are ready."""
    try:
        watcher.start()
        announce()
        if ready_fd is not None:
            sys.stdout.flush()
            os.dup2(2, 1)  # the process that detached this one reads stdout to its end
            process.report_ready(ready_fd)
        watcher.run()
    finally:
        watcher.end()


def detach(state: Path) -> None:
    """Run the same command in a process of its own, and print its output until it is ready.

    That process writes to a pipe, so the QR code of a `shoal join` command is printed here.
    """
    paths.make_directory(state)
    arguments = [a for a in sys.argv[1:] if a not in ("--detach", "-d")]
    log_file = state / "log"
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    with open(log_file, "ab") as errors:
        os.chmod(log_file, 0o600)
        begin = errors.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", "shoal.cli.main", *arguments, "--ready-fd", str(write_fd)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=[write_fd],
            start_new_session=True,
        )
    os.close(write_fd)
    assert child.stdout is not None
    for line in child.stdout.read().decode().splitlines():
        click.echo(line)
        if found := re.search(r"shoal join \S+$", line):
            show_qr(found[0])
    if os.read(read_fd, len(process.READY)) != process.READY:
        with open(log_file, "rb") as file:
            file.seek(begin)
            sys.stderr.write(file.read(8192).decode(errors="replace"))
        raise SystemExit(child.wait() or 1)
    click.echo(f"It runs in the background and logs to {log_file}.", err=True)
