"""A sample of torch's own databases, the same one everywhere. `make conformance` runs them whole."""

from __future__ import annotations

import pytest

from tests.conformance import suite

ONE_IN = 12  # about two minutes of one core

CHECKS = suite.sample(list(suite.all_checks()), ONE_IN)


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.name.replace(" ", "-"))
def test_sample(check: suite.Check) -> None:
    result = suite.run(check)
    assert result.passed, result.reason


def test_the_sample_holds_every_kind() -> None:
    assert {c.kind for c in CHECKS} == set(suite.KINDS)
