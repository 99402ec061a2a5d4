"""Some rounds of `python -m bench.chaos`; two hundred are for its command line."""

from __future__ import annotations

import pytest
from bench.chaos import Options, chaos

from tests.support import needs

ROLES = ["head", "runner", "agent", "worker", "disk", "clock"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_submissions_survive_what_is_broken() -> None:
    needs.command("cc")
    needs.command("mount")
    found = chaos(Options(8, 10.0, 0.2, 3, ROLES, settle_s=300.0, back_s=20.0))
    assert found.problems == []
    assert found.submitted > 0
