"""Waiting for a condition, with a deadline. Tests never wait for time.

A deadline is generous: 30 s for what takes a moment on a quiet machine. It is 8 s where something else
would end the wait after 10 s, such as a head that gives up a silent client.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Polls until `condition` holds and returns how long that took; fails after `seconds`."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds:
            raise AssertionError(f"after {seconds} s, still not: {what}")
        time.sleep(0.01)
    return time.monotonic() - start
