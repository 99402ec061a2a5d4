"""What the first hour on a GPU says of a figure."""

from __future__ import annotations

import pytest
from bench.first_hour.finding import Finding


@pytest.mark.parametrize(
    ("finding", "verdict", "expected", "shown"),
    [
        (Finding("x", 6.0, "GB/s", 5, 60), "ok", "5 to 60", "6 GB/s"),
        (Finding("x", 4.9, "GB/s", 5), "odd", "at least 5", "4.9 GB/s"),
        (Finding("x", 11, "ms", high=10), "odd", "at most 10", "11 ms"),
        (Finding("x", True), "ok", "yes", "yes"),
        (Finding("x", False), "FAILED", "yes", "no"),
        (Finding("x", None, "GB/s", 5, 60), "-", "5 to 60", "-"),
        (Finding("x", "A100"), "ok", "", "A100"),
    ],
)
def test_a_figure_is_judged(finding: Finding, verdict: str, expected: str, shown: str) -> None:
    assert (finding.verdict, finding.expected, finding.shown) == (verdict, expected, shown)
    assert finding.report()["verdict"] == verdict
