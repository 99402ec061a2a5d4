"""What a task's program asks about itself."""

from __future__ import annotations

import signal
import subprocess
import sys

PROGRAM = """
import os, signal, sys
if sys.argv[1] == "own":
    signal.signal(signal.SIGTERM, lambda *_: print("own"))
import shoal
print(shoal.task.should_yield())
os.kill(os.getpid(), signal.SIGTERM)
print(shoal.task.should_yield())
sys.exit(75)
"""


def ran(how: str, **environment: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], env=environment, capture_output=True, text=True,
        timeout=100,
    )  # fmt: skip
    return done.returncode, done.stdout.split()


def test_a_task_hears_that_it_should_yield() -> None:
    assert ran("", SHOAL_TASK="t-1") == (75, ["False", "True"])


def test_a_handler_of_the_program_is_called_as_well() -> None:
    assert ran("own", SHOAL_TASK="t-1") == (75, ["False", "own", "True"])


def test_without_a_task_sigterm_ends_a_program() -> None:
    code, said = ran("")
    assert code == -signal.SIGTERM
    assert said in ([], ["False"])
