"""A page that stands alone: one SVG per group, ratios on a logarithmic axis.

Met and missed targets differ in colour and in shape.
"""

from __future__ import annotations

import math
from html import escape
from itertools import groupby

from bench.figures import Figure, Run, number
from shoal import plots
from shoal.plots import BLUE, GREY, ORANGE, VERMILION

WIDTH, LABELS, ROW, TOP, BOTTOM = 900, 300, 24, 26, 34
RIGHT = 80  # room for the numbers


class Axis:
    """Ratios to pixels."""

    def __init__(self, figures: list[Figure]) -> None:
        values = [v for f in figures for v in (f.ratio.q1, f.ratio.q3, f.target or 1.0)] + [1.0]
        low, high = min(values), max(values)
        self.low = math.log10(low) - 0.08
        self.high = math.log10(high) + 0.08

    def at(self, ratio: float) -> float:
        share = (math.log10(ratio) - self.low) / (self.high - self.low)
        return LABELS + share * (WIDTH - LABELS - RIGHT)

    def ticks(self) -> list[float]:
        steps = (1, 2, 5) if self.high - self.low < 2.5 else (1,)
        if self.high - self.low < 0.6:
            steps = (1, 1.5, 2, 3, 5, 7, 8)
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        found = [step * 10.0**decade for decade in decades for step in steps]
        return [t for t in found if self.low <= math.log10(t) <= self.high]


def marker(figure: Figure, x: float, y: float) -> str:
    if figure.meets is False:
        return f'<path d="M{x} {y - 7}L{x + 7} {y}L{x} {y + 7}L{x - 7} {y}Z" fill="{VERMILION}"/>'
    colour = GREY if figure.meets is None else BLUE
    return f'<circle cx="{x}" cy="{y}" r="5.5" fill="{colour}"/>'


def row(figure: Figure, axis: Axis, y: float) -> str:
    x = axis.at(figure.ratio.median)
    q1, q3 = axis.at(figure.ratio.q1), axis.at(figure.ratio.q3)
    shapes = [
        plots.text(LABELS - 12, y + 4.5, figure.name, "end"),
        plots.line((q1, y), (q3, y), width=2),
    ]
    if figure.target is not None:
        at = axis.at(figure.target)
        shapes.append(plots.line((at, y - 9), (at, y + 9), ORANGE, 3))
    shapes.append(marker(figure, round(x, 1), y))
    ratio = number(figure.ratio.median)
    shapes.append(plots.text(WIDTH - 8, y + 4.5, ratio, "end"))
    title = f"{figure.name}: {ratio} ({figure.what}). {figure.note}"
    return f"<g><title>{escape(title)}</title>{''.join(shapes)}</g>"


def chart(figures: list[Figure]) -> str:
    axis = Axis(figures)
    height = TOP + ROW * len(figures) + BOTTOM
    bottom = TOP + ROW * len(figures)
    body = []
    for tick in axis.ticks():
        x = axis.at(tick)
        body.append(plots.line((x, TOP - 8), (x, bottom), width=1.5 if tick == 1 else 0.5))
        body.append(plots.text(x, bottom + 18, f"{tick:g}", "middle"))
    body += [row(f, axis, TOP + ROW * (i + 0.5)) for i, f in enumerate(figures)]
    return plots.svg(WIDTH, height, body, figures[0].what)


def page(run: Run, titles: dict[str, str], machine: str) -> str:
    """Return the whole page; it loads nothing from anywhere."""
    sections = []
    for group, found in groupby(run.figures, key=lambda figure: figure.group):
        figures = list(found)
        good = "lower is better" if figures[0].better == "lower" else "higher is better"
        sections.append(
            f"<h2>{escape(titles[group])}</h2><p>{escape(figures[0].what)}, {good}</p>"
            + chart(figures)
        )
    missing = "".join(f"<li>{escape(p.name)}: {escape(p.reason)}</li>" for p in run.missing)
    checks = "".join(
        f"<li>{'yes' if passed else 'NO'}: {escape(check)}</li>"
        for check, passed in run.checks.items()
    )
    key = (
        f'<p class="key"><span style="color:{BLUE}">● target met</span>'
        f'<span style="color:{VERMILION}">◆ target missed</span>'
        f'<span style="color:{GREY}">● no target</span>'
        f'<span style="color:{ORANGE}">▎ target</span>'
        "<span>grey line: from the first to the third quartile</span></p>"
    )
    return plots.page(
        "Shoal: speed of the device",
        f"<p>{escape(machine)}</p>{key}{''.join(sections)}"
        f"<h2>Peers that were not measured</h2><ul>{missing or '<li>none</li>'}</ul>"
        f"<h2>Checks</h2><ul>{checks}</ul>",
    )
