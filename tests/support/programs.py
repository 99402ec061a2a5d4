"""Running a Python program of its own, as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without a pool, with what the program needs."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SHOAL_")}
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **extra}


def start(source: str, *arguments: str, **extra: str) -> subprocess.Popen[str]:
    """Starts a program in a session of its own, so that signals reach it alone."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source), *arguments],
        stdin=subprocess.PIPE,  # a program that waits with input() ends when its test does
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**extra),
        start_new_session=True,
    )


def run(source: str, *arguments: str, timeout: float = 110, **extra: str) -> Outcome:
    """Runs a program to its end."""
    process = start(source, *arguments, **extra)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"the program did not end in {timeout} s: {out}{err}") from None
    return Outcome(process.returncode, out, err)


def succeed(source: str, *arguments: str, timeout: float = 110, **extra: str) -> str:
    """Runs a program that must end well; returns what it printed."""
    outcome = run(source, *arguments, timeout=timeout, **extra)
    assert outcome.code == 0, outcome.out + outcome.err
    return outcome.out
