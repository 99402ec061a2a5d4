"""The systemd units in deploy/systemd: systemd reads them without a complaint, and so does Shoal."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from shoal.cli.main import main

UNITS = sorted((Path(__file__).parents[2] / "deploy" / "systemd").glob("*.service"))
INSTALLED = "/opt/shoal/bin/shoal"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
@pytest.mark.parametrize("broken", [False, True])
def test_systemd_accepts_the_units(unit: Path, broken: bool, tmp_path: Path) -> None:
    text = unit.read_text().replace(INSTALLED, sys.executable)
    text = text.replace("User=shoal\n", "")  # an account that this machine need not have
    copy = tmp_path / unit.name
    copy.write_text(text.replace("KillMode=mixed", "KillMood=mixed") if broken else text)
    verify = ["systemd-analyze", "verify", "--man=no", str(copy)]
    result = subprocess.run(verify, capture_output=True, text=True, check=False, timeout=60)
    about_it = [line for line in result.stderr.splitlines() if unit.name in line]
    assert bool(about_it) == broken, result.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_units_start_commands_that_exist(unit: Path) -> None:
    (start,) = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
    program, name, *options = start.removeprefix("ExecStart=").split()
    assert program == INSTALLED
    assert options == ["$SHOAL_OPTIONS"]
    context = click.Context(main)
    command = main.get_command(context, name)
    assert command is not None
    known = {option for one in command.params for option in one.opts}
    (example,) = [line for line in unit.read_text().splitlines() if "SHOAL_OPTIONS=" in line]
    assert example.split("SHOAL_OPTIONS=")[1].split()[0] in known


def test_there_are_units() -> None:
    assert [unit.name for unit in UNITS] == ["shoal-node.service", "shoal.service"]
