"""README.md and docs/figures.md say what bench/results says."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
from bench import pages
from bench.figures import RESULTS, Run
from bench.loading import report as loading_report


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_the_tables_are_what_the_results_say(page: Path) -> None:
    text = page.read_text()
    assert pages.filled(text, pages.tables()) == text, "run: python -m bench.pages"


def test_every_table_has_one_place() -> None:
    places = [name for page in pages.PAGES for name in pages.PLACE.findall(page.read_text())]
    assert sorted(places) == sorted(pages.tables())


def test_a_place_without_a_table() -> None:
    page = "<!-- table: nothing -->\n<!-- end of table -->"
    with pytest.raises(ValueError, match="no table is called 'nothing'"):
        pages.filled(page, {"something": []})


def test_another_result_makes_another_summary() -> None:
    device, network = Run.load(RESULTS / "device.json"), Run.load(RESULTS / "network.json")
    other = copy.deepcopy(device)
    for figure in other.figures:
        if figure.name == "item()":
            figure.ratio = replace(figure.ratio, median=figure.ratio.median + 1)
    assert pages.summary(other, network) != pages.summary(device, network)


def test_loading_is_within_its_aim() -> None:
    """The claim: under 2 % idle for data, from a disk, with a share of the data cached."""
    results = loading_report.load()
    for case in results.cases:
        assert case.ours.idle_for_data < 0.02, case.format
        assert case.data_mib > results.share_mib >= case.ours.most_cached_mib
