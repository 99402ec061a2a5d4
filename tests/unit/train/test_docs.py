"""The figures of docs/training.md are those of the last measured run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench import loading_report, train_faults, train_hosts, train_report

DOCS = Path(__file__).parents[3] / "docs" / "training.md"


@pytest.mark.parametrize(
    ("module", "lines"),
    [
        ("bench.train_report", train_report.table()),
        ("bench.train_hosts", train_hosts.lines()),
        ("bench.loading_report", loading_report.lines(loading_report.load())),
        ("bench.train_faults", train_faults.lines(json.loads(train_faults.RESULTS.read_text()))),
    ],
)
def test_the_tables_are_what_the_results_say(module: str, lines: list[str]) -> None:
    page = DOCS.read_text().splitlines()
    missing = [line for line in lines if line not in page]
    assert not missing, f"see {module} and update the page"


def test_loading_is_within_its_aim() -> None:
    """What the page claims: under 2 % idle for data, from a disk, with a share of the data cached."""
    results = loading_report.load()
    for case in results.cases:
        assert case.ours.idle_for_data < 0.02, case.format
        assert case.data_mib > results.share_mib >= case.ours.most_cached_mib
