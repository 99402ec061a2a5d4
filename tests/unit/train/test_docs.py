"""The figures of docs/training.md are those of the last measured run."""

from __future__ import annotations

from pathlib import Path

from bench import train_report

DOCS = Path(__file__).parents[3] / "docs" / "training.md"


def test_the_table_is_what_the_results_say() -> None:
    page = DOCS.read_text().splitlines()
    missing = [line for line in train_report.table() if line not in page]
    assert not missing, "run `python -m bench.train_report` and update the page"
