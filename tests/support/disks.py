"""File systems of their own, to be filled or forbidden."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import needs


@contextlib.contextmanager
def file_system(where: Path, options: str) -> Iterator[Path]:
    """A file system of its own at `where`."""
    needs.command("mount")
    where.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "shoal-test", str(where)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)
