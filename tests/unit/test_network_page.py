"""docs/network.md says what bench/results/network.json says."""

from __future__ import annotations

import pytest
from bench import network_report
from bench.figures import RESULTS, Run


def test_the_tables_are_what_the_results_say() -> None:
    page = network_report.PAGE.read_text()
    run = Run.load(RESULTS / "network.json")
    assert network_report.filled(page, run) == page, "run: python -m bench.network_report"


def test_a_page_without_a_place_for_a_table() -> None:
    run = Run.load(RESULTS / "network.json")
    with pytest.raises(ValueError, match="no place for the table"):
        network_report.filled("nothing here", run)
