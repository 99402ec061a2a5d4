"""Watching processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from shoal.pool.base import process
from tests.support.waiting import wait_until


def test_the_end_of_a_process_is_seen_before_it_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = process.watch(child.pid)
    try:
        assert not process.has_ended(pidfd)
        child.kill()
        wait_until(lambda: process.has_ended(pidfd), 30, "the child's end was seen")
    finally:
        os.close(pidfd)
        child.communicate()


def test_exit_reasons_are_words() -> None:
    assert process.exit_reason(-signal.SIGKILL) == "it was killed by SIGKILL"
    assert process.exit_reason(3) == "it ended with exit code 3"
