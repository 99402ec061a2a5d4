"""What `fit` says while it runs, in a terminal and where there is none."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from shoal.train.group.timeline import Span, Timeline
from shoal.train.run.progress import ProgressBar


def said(terminal: bool, enabled: bool = True, skipped: int = 0) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    timeline = Timeline()
    with ProgressBar(10, timeline, enabled, console) as bar:
        bar.skip(skipped)
        for number in range(skipped, 4):
            now = time.perf_counter()
            timeline.add(Span("cpu/0", "compute", now - 1e-4, now, number))
            bar.step(number, 0, 2.5 - 0.5 * number, 32)
    return out.getvalue()


def test_lines_where_there_is_no_terminal() -> None:
    first, last = said(terminal=False).splitlines()
    assert re.fullmatch(
        r"epoch 0 step 2/10: loss 2  [\d,]+ samples/s  devices busy \d+%  [\d:]+ left", first
    )
    assert re.fullmatch(r"4 steps in [\d:]+: loss 2\.5 → 1, [\d,]+ samples/s", last)


def test_a_bar_in_a_terminal() -> None:
    text = said(terminal=True)
    for part in ("epoch 0", "4/10", "loss 1 ", "samples/s", "devices busy", "0:00:"):
        assert part in text
    assert "4 steps in" in text.splitlines()[-1]


@pytest.mark.parametrize("terminal", [False, True])
def test_steps_of_earlier_runs_count(terminal: bool) -> None:
    text = said(terminal, skipped=2)
    assert "2 steps in" in text.splitlines()[-1]
    assert ("resumes after step 2" in text) != terminal


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_is_said_where_nothing_is_wanted(terminal: bool) -> None:
    assert said(terminal, enabled=False) == ""
