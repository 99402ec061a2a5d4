"""Parts of HTML pages and SVG plots that stand alone: no script, no network.

The colours are those of Okabe and Ito, which people with any colour vision can tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

BLUE, ORANGE, GREEN, VERMILION = "#0072b2", "#e69f00", "#009e73", "#d55e00"
SKY, PURPLE, YELLOW, GREY = "#56b4e9", "#cc79a7", "#f0e442", "#888888"
COLOURS = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, YELLOW, GREY)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }
svg { width: 100%; height: auto } text { font: 12px system-ui, sans-serif; fill: currentColor }
td, th { padding: .1rem .8rem; text-align: right }
td:first-child, th:first-child { text-align: left }
.key { margin-right: 1rem; white-space: nowrap }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .3em }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } }
"""


def page(title: str, body: str, style: str = "") -> str:
    """Return a whole page. `body` and `style` are HTML and CSS."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}{style}</style>"
        f"<h1>{escape(title)}</h1>{body}</html>\n"
    )


def svg(width: float, height: float, body: Iterable[str], label: str) -> str:
    """Return a plot; `label` describes it to screen readers."""
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label)}">'
        f"{''.join(body)}</svg>"
    )


def text(x: float, y: float, words: str, anchor: str = "start", colour: str = "") -> str:
    style = f' style="fill:{colour}"' if colour else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(words)}</text>'


def line(
    start: tuple[float, float], stop: tuple[float, float], colour: str = GREY, width: float = 0.4
) -> str:
    return (
        f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{stop[0]:.1f}" y2="{stop[1]:.1f}" '
        f'stroke="{colour}" stroke-width="{width:g}"/>'
    )


def rect(corner: tuple[float, float], size: tuple[float, float], colour: str, tip: str = "") -> str:
    """Return a rectangle; `tip` shows under the pointer."""
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<rect x="{corner[0]:.2f}" y="{corner[1]:.1f}" width="{size[0]:.2f}" '
        f'height="{size[1]:.1f}" fill="{colour}">{title}</rect>'
    )


def polyline(points: Iterable[tuple[float, float]], colour: str, width: float = 1.5) -> str:
    listed = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{listed}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>'


def legend(colours: Iterable[tuple[str, str]]) -> str:
    """Return a paragraph of (name, colour) pairs."""
    keys = "".join(
        f'<span class="key"><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in colours
    )
    return f"<p>{keys}</p>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    cells = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{''.join(cells)}</table>"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return about so many round numbers between two values.

    >>> ticks(0, 126)
    [0, 20, 40, 60, 80, 100, 120]
    """
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.7)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]
