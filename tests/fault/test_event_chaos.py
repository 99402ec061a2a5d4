"""Some rounds of `python -m bench.event_chaos`; a hundred are for its command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.event_chaos import chaos

from tests.support.standing import StandingPool

ROUNDS = 12


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_event_has_one_result_whatever_is_killed(tmp_path: Path) -> None:
    with StandingPool(tmp_path, listen=True, web=True) as pool:
        found = chaos(pool, ROUNDS, seed=21)
    assert found.problems == []
    assert found.kills["head"] >= ROUNDS
    assert found.kills["web"] > 0
