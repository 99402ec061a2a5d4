"""Pools that the cases share, and the results of a run for docs/ecosystem.md."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shoal


@pytest.fixture(scope="session")
def pool() -> Iterator[str]:
    """The URL of a pool with one device."""
    with shoal.up(devices=["cpu"]) as started:
        yield started.url


@pytest.fixture(scope="session")
def small_pool() -> Iterator[str]:
    """The URL of a pool whose device has 64 MiB and nowhere to move data to."""
    with shoal.up(devices=["cpu,memory=64MiB,host=0,disk=0"]) as started:
        yield started.url


@pytest.fixture(scope="session")
def results() -> Iterator[list[dict[str, Any]]]:
    """What the cases found. `make test-ecosystem` writes the page's table from it."""
    found: list[dict[str, Any]] = []
    yield found
    path = os.environ.get("SHOAL_ECOSYSTEM_RESULTS")
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(found, indent=1))
