"""docs/memory.md says what the results say."""

from __future__ import annotations

from pathlib import Path

from bench import memory_report

PAGE = Path(__file__).parents[3] / "docs" / "memory.md"


def test_the_figures_are_what_the_results_say() -> None:
    page = PAGE.read_text().splitlines()
    missing = [line for line in memory_report.lines(memory_report.load()) if line not in page]
    assert not missing, "run `python -m bench.memory_report` and update the page"
