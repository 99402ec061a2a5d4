"""Keeps the last rounds of a pool, so that a live day can be run again by the simulator."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shoal.pool.base import limits
from shoal.schedule.formats.records import Record

_log = logging.getLogger(__name__)


class Recorder:
    """Two files that take turns, each of half the rounds; without a path, memory.

    A disk that is full loses records and nothing else.
    """

    def __init__(self, path: Path | None, most: int = limits.ROUNDS_RECORDED_MAX) -> None:
        self._path = path
        self._half = max(1, most // 2)
        self._memory: deque[bytes] = deque(maxlen=most)
        self._lines = 0
        self._failed = False
        if path is not None and path.exists():
            with path.open("rb") as file:
                self._lines = sum(1 for _ in file)

    def add(self, record: Record) -> None:
        line = msgspec.json.encode(record) + b"\n"
        if self._path is None:
            self._memory.append(line)
            return
        try:
            if self._lines >= self._half:
                self._path.replace(older(self._path))
                self._lines = 0
            with self._path.open("ab") as file:
                file.write(line)
            self._lines += 1
            self._failed = False
        except OSError as error:
            if not self._failed:
                self._failed = True
                _log.warning("rounds are not recorded in %s: %s", self._path, error)

    def lines(self) -> Iterator[bytes]:
        """Return the records, the oldest first."""
        if self._path is None:
            yield from self._memory
            return
        yield from lines_of(self._path)


def older(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def lines_of(path: Path) -> Iterator[bytes]:
    """Return the whole lines of both files, the oldest first."""
    for one in (older(path), path):
        if one.exists():
            with one.open("rb") as file:
                yield from (line for line in file if line.endswith(b"\n"))
