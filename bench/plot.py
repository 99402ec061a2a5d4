"""A page that stands alone: one SVG per group, ratios on a logarithmic axis.

Colours are those of Okabe and Ito, which colour-blind people can tell apart; met and missed targets
differ in shape as well.
"""

from __future__ import annotations

import math
from html import escape
from itertools import groupby

from bench.figures import Figure, Run, number

BLUE, VERMILION, GREY, ORANGE = "#0072B2", "#D55E00", "#666666", "#E69F00"
WIDTH, LABELS, ROW, TOP, BOTTOM = 900, 300, 24, 26, 34
RIGHT = 80  # room for the numbers
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 920px; margin: 2rem auto; color: #222;
       background: #fff; padding: 0 1rem }
svg { width: 100%; height: auto; font: 13px system-ui, sans-serif }
.key span { margin-right: 1.5em; white-space: nowrap }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd }
  svg text { fill: #ddd }
}
"""


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
    parts = [
        f'<text x="{LABELS - 12}" y="{y + 4.5}" text-anchor="end">{escape(figure.name)}</text>',
        f'<line x1="{q1:.1f}" x2="{q3:.1f}" y1="{y}" y2="{y}" stroke="{GREY}" stroke-width="2"/>',
    ]
    if figure.target is not None:
        at = axis.at(figure.target)
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y - 9}" y2="{y + 9}" stroke="{ORANGE}" '
            'stroke-width="3"/>'
        )
    parts.append(marker(figure, round(x, 1), y))
    ratio = number(figure.ratio.median)
    parts.append(f'<text x="{WIDTH - 8}" y="{y + 4.5}" text-anchor="end">{ratio}</text>')
    title = f"{figure.name}: {ratio} ({figure.what}). {figure.note}"
    return f"<g><title>{escape(title)}</title>{''.join(parts)}</g>"


def chart(figures: list[Figure]) -> str:
    axis = Axis(figures)
    height = TOP + ROW * len(figures) + BOTTOM
    bottom = TOP + ROW * len(figures)
    parts = []
    for tick in axis.ticks():
        x = axis.at(tick)
        weight = 1.5 if tick == 1 else 0.5
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{bottom}" stroke="{GREY}" '
            f'stroke-width="{weight}"/>'
            f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>'
        )
    parts += [row(f, axis, TOP + ROW * (i + 0.5)) for i, f in enumerate(figures)]
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(figures[0].what)}">{"".join(parts)}</svg>'
    )


def page(run: Run, titles: dict[str, str], machine: str) -> str:
    """The whole page; it loads nothing from anywhere."""
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
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Shoal: speed of the device</title><style>{STYLE}</style>"
        f"<h1>Speed of the device</h1><p>{escape(machine)}</p>{key}{''.join(sections)}"
        f"<h2>Peers that were not measured</h2><ul>{missing or '<li>none</li>'}</ul>"
        f"<h2>Checks</h2><ul>{checks}</ul></html>\n"
    )
