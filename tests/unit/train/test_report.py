"""The page and the trace of a training."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shoal.plots import ticks
from shoal.train.group.timeline import Span, Timeline
from shoal.train.run.report import last_steps, usage, write_html

SPANS = [
    Span("cpu/0", "compute", 0.0, 0.6, 0),
    Span("cpu/0", "compute", 0.5, 0.7, 0),  # overlaps: counted once
    Span("cpu/1 <b>", "forward", 0.2, 0.4, 0),
    Span("exchange", "exchange", 0.6, 1.0, 0),
]


def test_fractions_of_the_time_add_up() -> None:
    uses = {use.track: use.fractions for use in usage(SPANS)}
    assert uses["cpu/0"]["compute"] == pytest.approx(0.7)
    assert uses["cpu/0"]["idle"] == pytest.approx(0.3)
    assert uses["cpu/1 <b>"]["idle"] == pytest.approx(0.8)
    assert usage([]) == []


def test_the_last_whole_steps_are_shown() -> None:
    spans = [Span("a", "compute", float(i), i + 0.5, i) for i in range(10)]
    assert {s.step for s in last_steps(spans, 3)} == {6, 7, 8}
    assert len(last_steps(spans[:1])) == 1
    assert last_steps([]) == []


def test_steps_of_a_pipeline_that_were_timed_in_detail_are_shown() -> None:
    detailed = [*range(8), *range(64, 66)]  # the last ones are too few to show
    spans = [
        Span("a", "forward" if i in detailed else "compute", float(i), i + 0.5, i)
        for i in range(66)
    ]
    assert [s.step for s in last_steps(spans, 4)] == [4, 5, 6, 7]
    assert [s.step for s in last_steps(spans[:3], 4)] == [0, 1]
    by_twos = [Span("a", "forward", float(i), i + 0.5, i) for i in (0, 1, 50, 51, 100, 101)]
    assert [s.step for s in last_steps(by_twos, 4)] == [50, 51]
    last = Span("a", "compute", 120.0, 120.5, 120)
    assert [s.step for s in last_steps([*by_twos, last], 4)] == [100, 101]


class _Checker(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(v) for k, v in attrs if k in ("src", "href")]


@pytest.mark.parametrize("losses", [[], [math.nan], [2.0, 1.0, math.nan, 0.5], [1.0] * 9000])
def test_the_page_stands_alone(tmp_path: Path, losses: list[float]) -> None:
    write_html(tmp_path / "r.html", losses, [(1, 0.7)] if losses else [], SPANS, "a < b")
    text = (tmp_path / "r.html").read_text()
    checker = _Checker()
    checker.feed(text)
    assert checker.links == []
    assert "script" not in checker.tags
    assert "a &lt; b" in text
    assert "cpu/1 &lt;b&gt;" in text
    assert checker.tags.count("rect") == 3 + len(SPANS)
    assert len(text) < 200_000


def test_what_the_page_shows_is_labelled(tmp_path: Path) -> None:
    spans = [*SPANS, Span("waiting for data", "loading", 0.0, 0.1, 0)]
    write_html(tmp_path / "r.html", [2.0, 1.0], [(1, 0.7)], spans)
    text = (tmp_path / "r.html").read_text()
    for part in (">loss<", ">step<", ">time, ms<", ">1000<", "bubbles", "exchange", "validation"):
        assert part in text, part


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 126, [0, 20, 40, 60, 80, 100, 120]),
        (0.011, 0.69, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
        (2, 2, [2]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_the_trace_is_what_chrome_reads(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.add(SPANS[0])
    with timeline.span("host", "loading", 7):
        pass
    timeline.write_chrome_trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"host", "cpu/0"}
    assert {(e["name"], e["args"]["step"]) for e in events if e["ph"] == "X"} == {
        ("loading", 7),
        ("compute", 0),
    }
    assert [s.kind for s in timeline.since(0.5)] == ["loading", "compute"]
    assert [s.kind for s in timeline.since(0.65)] == ["loading"]
