"""`python -m tests.standin MODE -- CMD…`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.standin.environment import MODES

ROOT = Path(__file__).resolve().parents[3]
#: Two fills of one block on streams that nothing orders.
UNORDERED = """
import os
from tests.standin.driver import Driver
driver = Driver(os.environ["SHOAL_CUDA_DRIVER"])
there = driver.allocate()
for _ in range(2):
    driver.fill(there, 65, 8, driver.stream())
driver("cuCtxSynchronize")
"""


def standin(
    *arguments: str, command: tuple[str, ...], **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.standin", *arguments, "--", *command],
        env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip


def test_an_unordered_access_is_an_error_of_its_own() -> None:
    done = standin("late", command=(sys.executable, "-c", UNORDERED))
    assert done.returncode == 99
    assert "unordered access" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("races=1")


def test_a_program_without_kernels_is_an_error_of_its_own() -> None:
    done = standin("late", command=(sys.executable, "-c", "print('nothing')"))
    assert done.returncode == 98
    assert done.stdout == "nothing\n"
    assert done.stderr == "standin: kernels=0 driver_calls=0 races=0\n"


def test_the_code_of_the_program_is_kept() -> None:
    assert standin("now", command=(sys.executable, "-c", "raise SystemExit(7)")).returncode == 7


def test_options_follow_the_mode() -> None:
    names = ("STANDIN_DEVICES", "STANDIN_MEMORY_BYTES", "STANDIN_SEED")
    program = f"import os; print([os.environ.get(name) for name in {names}])"
    done = standin(
        "random", "--devices", "2", "--memory", "256MiB", "--seed", "3",
        command=(sys.executable, "-c", program),
    )  # fmt: skip
    assert done.stdout == "['2', '268435456', '3']\n"


def test_the_call_that_fails_is_an_error_of_the_program() -> None:
    program = UNORDERED.replace("range(2)", "range(1)")
    done = standin("late", "--fail-call", "10", command=(sys.executable, "-c", program))
    assert done.returncode == 1
    assert "DriverError: cu" in done.stderr
    assert "returned 999" in done.stderr


LEFT_TO_SLOW = [pytest.param(m, marks=pytest.mark.slow) for m in MODES if m != "late"]


@pytest.mark.parametrize("mode", ["late", *LEFT_TO_SLOW])
def test_a_program_trains_on_it(mode: str) -> None:
    done = standin(
        mode, command=(sys.executable, str(Path(__file__).with_name("trains.py"))),
        STANDIN_INSTEAD_OF_CPU="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal\n"
    last = re.fullmatch(
        r"standin: kernels=(\d+) driver_calls=(\d+) races=0", done.stderr.splitlines()[-1]
    )
    assert last is not None
    assert int(last[1]) > 100
