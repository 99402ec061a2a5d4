"""Runs a few lines against the fake driver in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.standin.environment import Counts, Options, Run

ROOT = Path(__file__).resolve().parents[3]
_START = """
import ctypes, os, sys, time
from tests.standin.driver import *
def start(device=0):
    return Driver(os.environ["SHOAL_CUDA_DRIVER"], device)
def code_of(name, call, *arguments):
    try:
        call(*arguments)
    except DriverError as error:
        return error.code
    return 0
"""


class Child:
    """A finished child."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code = done.returncode
        self.output = done.stdout.split()
        self.errors = done.stderr


def spawn(run: Run, program: str) -> subprocess.Popen[str]:
    """Start lines that have `start()` and the names of tests.standin.driver."""
    # They need no Shoal and no torch, so no site packages: they start in 50 ms.
    environment = {**os.environ, **run.environment(), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-S", "-c", _START + textwrap.dedent(program)],
        cwd=ROOT, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(child: subprocess.Popen[str]) -> Child:
    """Wait for a child."""
    output, errors = child.communicate(timeout=60)
    return Child(subprocess.CompletedProcess(child.args, child.returncode, output, errors))


def lines(options: Options, program: str) -> tuple[Child, Counts]:
    """Run lines alone on a stand-in; return the child and what was counted."""
    run = Run(options)
    try:
        child = finish(spawn(run, program))
        return child, run.counts()
    finally:
        run.close()
