"""A sample of torch's own databases, the same one everywhere. `make conformance` runs them whole."""

from __future__ import annotations

import pytest

from tests.conformance import suite

ONE_IN = {"operators": 20, "modules": 12, "optimizers": 4}  # about a minute of one core

CHECKS = list(suite.all_checks())
SAMPLE = [c for c in suite.sample(CHECKS, ONE_IN) if c.subject not in suite.REFUSED]


@pytest.mark.parametrize("check", SAMPLE, ids=lambda c: c.name.replace(" ", "-"))
def test_sample(check: suite.Check) -> None:
    result = suite.run(check)
    assert not result.failed, result.reason


def test_the_sample_holds_every_kind() -> None:
    assert {c.kind for c in SAMPLE} == set(suite.KINDS)
    assert "gradient" in {c.variant for c in SAMPLE}


def test_gradients_are_really_compared() -> None:
    """A check that compares nothing passes always: it must be seen to compare, and to fail."""
    gradients = {c.subject: c for c in CHECKS if c.variant == "gradient"}
    for subject in ("mul", "linalg.svd", "nn.functional.conv2d", "logsumexp"):
        result = suite.run(gradients[subject])
        assert result.passed, result.reason
        assert result.samples > 1


@pytest.mark.parametrize("subject", sorted(suite.REFUSED))
def test_what_is_refused_is_refused_clearly(subject: str) -> None:
    reasons = [suite.run(check).reason for check in CHECKS if check.subject == subject]
    told = [reason for reason in reasons if reason is not None]  # None: local torch refuses it too
    assert told
    assert all("shoal device" in reason and "hold" in reason for reason in told)
