"""A process that a thread keeps: it restarts, tries again, and ends when asked."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from shoal.pool.engines.kept import Kept
from shoal.pool.local.supervisor import Supervised
from tests.support import processes
from tests.support.waiting import wait_until

PROGRAM = """
import time
from shoal.pool.base import process
process.report_ready()
time.sleep(600)
"""


@pytest.fixture
def one(tmp_path: Path) -> Supervised:
    (tmp_path / "kept_program.py").write_text(PROGRAM)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return Supervised("part", "kept_program", "{}", environment={**os.environ, "PYTHONPATH": path})


def test_it_restarts_and_ends(one: Supervised) -> None:
    kept = Kept(one, lambda _: None)
    wait_until(lambda: kept.pid != 0 and not kept.problem, 30, "it runs")
    first = kept.pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: kept.pid not in (0, first), 30, "it runs again")
    second = kept.pid
    assert kept.restarts == 1
    kept.stop()
    assert kept.pid == 0
    assert not processes.alive(second)


def test_it_says_why_and_tries_again(one: Supervised) -> None:
    problems = ["the head is away", "the disk is full"]

    def prepare(_: Supervised) -> None:
        if problems:
            raise OSError(problems.pop(0))

    kept = Kept(one, prepare)
    wait_until(lambda: "the disk is full" in kept.problem, 30, "it says why")
    wait_until(lambda: kept.pid != 0 and not kept.problem, 30, "it runs")
    kept.stop()


def test_it_ends_while_it_waits_for_the_next_attempt(one: Supervised) -> None:
    def prepare(_: Supervised) -> None:
        raise OSError("never")

    kept = Kept(one, prepare)
    wait_until(lambda: "never" in kept.problem, 30, "it has failed")
    kept.stop()
    assert kept.pid == 0
