"""From nothing to a training on another host, as docs/pool.md says it: five commands, a line each.

The first two are `pip install shoal` on either machine, which this environment stands for. The others
are typed here into shells on two hosts, as they are printed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import processes, programs
from tests.support.namespaces import Host, Hosts
from tests.support.waiting import wait_until

PROGRAM = Path(__file__).parent / "programs" / "gpt2.py"
LINE_MAX = 80


class Terminal:
    """A shell on a host, with a home that nobody has used before."""

    def __init__(self, host: Host, home: Path) -> None:
        self.host = host
        (home / "bin").mkdir(parents=True)
        for name, words in {"shoal": "-m shoal.cli.main", "python": ""}.items():
            script = home / "bin" / name
            script.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
            script.chmod(0o755)
        kept = programs.environment()
        self.environment = {
            **kept, "HOME": str(home), "PATH": f"{home / 'bin'}:{kept['PATH']}",
            "XDG_STATE_HOME": str(home / "state"), "XDG_CONFIG_HOME": str(home / "config"),
        }  # fmt: skip
        self.typed: list[str] = []

    def start(self, line: str) -> subprocess.Popen[str]:
        self.typed.append(line)
        return subprocess.Popen(
            self.host.command("sh", "-c", f"exec {line}"), env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def run(self, line: str) -> str:
        out, err = (process := self.start(line)).communicate(timeout=100)
        assert process.returncode == 0, out + err
        return out


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[tuple[Terminal, Terminal]]:
    with Hosts(2) as (server, desk):
        yield Terminal(server, tmp_path / "server"), Terminal(desk, tmp_path / "desk")


@pytest.mark.slow
def test_five_commands(terminals: tuple[Terminal, Terminal]) -> None:
    server, desk = terminals
    up = server.start(f"shoal up --listen {server.host.address}")
    pids = [up.pid]
    try:
        assert up.stdout is not None
        printed: list[str] = []
        while not any("shoal join" in line for line in printed):
            printed.append(up.stdout.readline())
            assert printed[-1], up.communicate()[1]
        join = next(line for line in printed if "shoal join" in line)
        desk.run(join[join.index("shoal join") :].strip())
        trained = desk.run(f"python {PROGRAM} shoal")
        assert trained == desk.run(f"python {PROGRAM} cpu")
        assert "grant" in server.run("shoal audit")
        pids = [up.pid, *processes.descendants(up.pid)]
    finally:
        up.terminate()
        up.communicate(timeout=20)
    wait_until(lambda: not any(map(processes.alive, pids)), 30, "nothing is left")
    commands = ["pip install shoal"] * 2 + server.typed[:1] + desk.typed[:2]
    assert len(commands) == 5
    assert all(len(c.replace(str(PROGRAM), "train.py")) < LINE_MAX for c in commands), commands
