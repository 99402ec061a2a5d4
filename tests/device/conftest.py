"""Every test here runs with a live device."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _live(device: object) -> None:
    """Makes sure of a device for tests that only say "shoal"."""
