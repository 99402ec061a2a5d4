"""Every code that a command shows on a terminal is there as a QR code too, and a decoder reads it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import zxingcpp

from tests.support import programs
from tests.support.standing import StandingPool, free_port, shoal_command

#: Two modules, one above the other: which of them are light.
BLOCKS = {" ": (0, 0), "▀": (1, 0), "▄": (0, 1), "█": (1, 1)}
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    with StandingPool(tmp_path_factory.mktemp("codes"), listen=True) as made:
        yield made


def on_terminal(directory: Path, *arguments: str) -> str:
    """Run a command whose output is a terminal."""
    ours, its = pty.openpty()
    environment = programs.environment(SHOAL_STATE=str(directory / "state"))
    child = subprocess.Popen(shoal_command(*arguments), env=environment, stdout=its, stderr=its)
    os.close(its)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:
        pass  # its end, on Linux
    os.close(ours)
    assert child.wait(60) == 0, shown
    return ESCAPES.sub("", shown.decode()).replace("\r", "")


def decode(shown: str) -> str:
    """Read the QR code among the lines of a terminal, which is light on dark."""
    drawn = [line for line in shown.splitlines() if len(line) > 20 and not set(line) - set(BLOCKS)]
    assert drawn, shown
    width = max(map(len, drawn))
    rows = [[BLOCKS[c][half] for c in line.ljust(width)] for line in drawn for half in (0, 1)]
    picture = numpy.kron(numpy.array(rows, "uint8") * 255, numpy.ones((6, 6), "uint8"))
    found = zxingcpp.read_barcodes(picture)
    assert found, shown
    return str(found[0].text)


def test_a_join_code(pool: StandingPool) -> None:
    shown = on_terminal(pool.directory, "code", "--name", pool.name)
    assert f"shoal join {decode(shown)}" in shown


def test_the_code_of_an_event(pool: StandingPool) -> None:
    shown = on_terminal(pool.directory, "event", "open", "GPU hour", "--pool", pool.name)
    assert f"shoal enrol {decode(shown)}" in shown


def test_a_pool_that_starts_in_the_background(tmp_path: Path) -> None:
    """Its processes write to a pipe; the terminal is that of `shoal up --detach`."""
    name = f"qr{os.getpid()}"
    options = ["--name", name, "--no-profile", "--no-tasks", "--device", "cpu,memory=64MiB"]
    up = ["up", "--detach", *options, "--listen", f"127.0.0.1:{free_port()}"]
    try:
        shown = on_terminal(tmp_path, *up)
        assert f"shoal join {decode(shown)}" in shown
        assert re.search(r"dashboard +http://127.0.0.1:\d+", shown)
    finally:
        on_terminal(tmp_path, "down", "--name", name)
