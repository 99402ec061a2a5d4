"""The head's clock and randomness, handed in so that tests can have their own."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """`now` is Unix time, for people and the store; `monotonic` is for deadlines."""

    now: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Randomness:
    """Numbers that nobody can guess.

    >>> Randomness(below=lambda most: 0).text("xyz", 3)
    'xxx'
    """

    below: Callable[[int], int] = secrets.randbelow
    token: Callable[[int], str] = secrets.token_urlsafe  # of this many random bytes

    def text(self, symbols: str, length: int) -> str:
        return "".join(symbols[self.below(len(symbols))] for _ in range(length))
