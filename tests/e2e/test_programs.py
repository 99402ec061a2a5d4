"""Whole programs, as a stranger would write them: the same output on the device as on the CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import programs

FOLDER = Path(__file__).parent / "programs"
NAMES = sorted(p.stem for p in FOLDER.glob("*.py"))
NUMBER = re.compile(r"-?\d+\.\d+")


RUNNER = """
    import runpy, sys
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def outputs(name: str, *devices: str) -> list[str]:
    """What the program prints on each device. They run side by side."""
    path = str(FOLDER / f"{name}.py")
    running = [programs.start(RUNNER, path, device) for device in devices]
    printed = []
    for program in running:
        out, err = program.communicate(timeout=110)
        assert program.returncode == 0, out + err
        printed.append(out)
    return printed


@pytest.mark.parametrize("name", NAMES)
def test_a_program_prints_on_the_device_what_it_prints_on_the_cpu(name: str) -> None:
    expected, actual = outputs(name, "cpu", "shoal")
    assert NUMBER.sub("#", actual) == NUMBER.sub("#", expected)  # all but the numbers is the same
    numbers = [float(n) for n in NUMBER.findall(expected)]
    assert [float(n) for n in NUMBER.findall(actual)] == pytest.approx(numbers, rel=2e-4, abs=2e-5)
    assert expected.strip(), "a program that prints nothing shows nothing"


def test_no_program_knows_of_shoal() -> None:
    for name in NAMES:
        assert "shoal" not in (FOLDER / f"{name}.py").read_text()
