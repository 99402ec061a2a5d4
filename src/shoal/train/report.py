"""A page about a training: the loss, and where the time of a step went. One file, no scripts."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.train.timeline import Span

#: Distinct for people who see colours differently, and on light and dark screens.
COLOURS = {
    "compute": "#0072b2", "forward": "#56b4e9", "backward": "#0072b2", "exchange": "#e69f00",
    "loading": "#009e73", "checkpoint": "#cc79a7", "optimizer": "#d55e00", "idle": "#cccccc",
}  # fmt: skip
WORK = ("compute", "forward", "backward")
WIDTH, PLOT_HEIGHT, ROW = 900, 240, 22
SHOWN_STEPS = 4
POINTS_MAX = 2000


@dataclass(frozen=True, slots=True)
class TrackUse:
    """How a track's time was used, as parts of the whole."""

    track: str
    parts: dict[str, float]  # kind -> part; "idle" is the rest (bubbles, waiting)


def usage(spans: Sequence[Span]) -> list[TrackUse]:
    """The parts of compute, exchange, loading and waiting of each track, over the spans' time."""
    if not spans:
        return []
    start, stop = min(s.start_s for s in spans), max(s.stop_s for s in spans)
    whole = max(stop - start, 1e-9)
    uses = []
    for track in sorted({s.track for s in spans}):
        parts = {}
        for kind in sorted({s.kind for s in spans if s.track == track}):
            parts[kind] = _covered([s for s in spans if (s.track, s.kind) == (track, kind)]) / whole
        busy = _covered([s for s in spans if s.track == track]) / whole
        parts["idle"] = max(0.0, 1 - busy)
        uses.append(TrackUse(track, parts))
    return uses


def _covered(spans: Sequence[Span]) -> float:
    """Seconds in which at least one of the spans runs."""
    total, until = 0.0, -math.inf
    for span in sorted(spans, key=lambda s: s.start_s):
        total += max(0.0, span.stop_s - max(span.start_s, until))
        until = max(until, span.stop_s)
    return total


def last_steps(spans: Sequence[Span], count: int = SHOWN_STEPS) -> list[Span]:
    """The spans of the last whole steps; the very last one may still be incomplete."""
    steps = sorted({s.step for s in spans})
    shown = set(steps[-count - 1 : -1] or steps)
    return [s for s in spans if s.step in shown]


def write_html(
    path: str | Path,
    losses: Sequence[float],
    validation: Sequence[tuple[int, float]],
    spans: Sequence[Span],
    title: str = "training",
) -> None:
    """Writes the page."""
    shown = last_steps(spans)
    legend = " ".join(
        f'<span class="key"><i style="background:{colour}"></i>{kind}</span>'
        for kind, colour in COLOURS.items()
        if kind == "idle" or any(s.kind == kind for s in spans)
    )
    page = f"""<!doctype html><html lang="en"><meta charset="utf-8">
<title>{html.escape(title)}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: {WIDTH + 40}px; }}
svg {{ width: 100%; height: auto; }} text {{ font-size: 11px; fill: currentColor; }}
.key {{ margin-right: 1rem; }} .key i {{ display: inline-block; width: .8em; height: .8em;
margin-right: .3em; }} td, th {{ text-align: right; padding: .1rem .8rem; }}
td:first-child, th:first-child {{ text-align: left; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #111; color: #ddd; }} }}
</style>
<h1>{html.escape(title)}</h1>
<p>{_summary(losses, validation)}</p>
<h2>Loss</h2>{_loss_plot(losses, validation)}
<h2>Timeline of the last steps</h2><p>{legend}</p>{_timeline_plot(shown)}
<h2>Use of the time</h2>{_table(usage(shown))}
</html>
"""
    Path(path).write_text(page)


def _summary(losses: Sequence[float], validation: Sequence[tuple[int, float]]) -> str:
    known = [x for x in losses if math.isfinite(x)]
    if not known:
        return "No losses were recorded."
    text = f"{len(losses)} steps; loss {known[0]:.4g} at first, {known[-1]:.4g} at last"
    if validation:
        best = min(validation, key=lambda v: v[1])
        text += f"; best validation loss {best[1]:.4g} after step {best[0]}"
    return text + "."


def _loss_plot(losses: Sequence[float], validation: Sequence[tuple[int, float]]) -> str:
    stride = max(1, math.ceil(len(losses) / POINTS_MAX))
    points = [(i, x) for i, x in enumerate(losses) if i % stride == 0 and math.isfinite(x)]
    checks = [(i, x) for i, x in validation if math.isfinite(x)]
    if not points:
        return "<p>No losses.</p>"
    ys = [y for _, y in [*points, *checks]]
    low, high = min(ys), max(ys)
    right = max(max(x for x, _ in [*points, *checks]), 1)

    def at(x: float, y: float) -> str:
        px = 50 + x / right * (WIDTH - 70)
        py = 10 + (high - y) / ((high - low) or 1) * (PLOT_HEIGHT - 40)
        return f"{px:.1f},{py:.1f}"

    line = " ".join(at(x, y) for x, y in points)
    dots = "".join(_dot(at(x, y), y) for x, y in checks)
    labels = (
        f'<text x="0" y="16">{high:.3g}</text><text x="0" y="{PLOT_HEIGHT - 28}">{low:.3g}</text>'
        f'<text x="{WIDTH - 60}" y="{PLOT_HEIGHT - 8}">step {right}</text>'
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {PLOT_HEIGHT}" role="img" aria-label="loss by step">'
        f'<polyline points="{line}" fill="none" stroke="#0072b2" stroke-width="1.5"/>{dots}{labels}'
        "</svg>"
    )


def _dot(place: str, value: float) -> str:
    x, _, y = place.partition(",")
    title = f"<title>validation {value:.4g}</title>"
    return f'<circle cx="{x}" cy="{y}" r="3" fill="#d55e00">{title}</circle>'


def _timeline_plot(spans: Sequence[Span]) -> str:
    if not spans:
        return "<p>No spans.</p>"
    tracks = sorted({s.track for s in spans})
    start, stop = min(s.start_s for s in spans), max(s.stop_s for s in spans)
    scale = (WIDTH - 160) / max(stop - start, 1e-9)
    height = ROW * len(tracks) + 20
    parts = []
    for row, track in enumerate(tracks):
        y = row * ROW
        parts.append(f'<text x="0" y="{y + 14}">{html.escape(track[:24])}</text>')
        parts.append(
            f'<rect x="150" y="{y + 3}" width="{WIDTH - 160}" height="{ROW - 6}" '
            f'fill="{COLOURS["idle"]}" opacity="0.4"/>'
        )
    for span in spans:
        y = tracks.index(span.track) * ROW
        x, width = 150 + (span.start_s - start) * scale, max(0.4, span.seconds * scale)
        parts.append(
            f'<rect x="{x:.2f}" y="{y + 3}" width="{width:.2f}" height="{ROW - 6}" '
            f'fill="{COLOURS.get(span.kind, "#888")}"><title>{span.kind}, step {span.step}: '
            f"{span.seconds * 1e3:.2f} ms</title></rect>"
        )
    parts.append(f'<text x="150" y="{height - 4}">0 ms</text>')
    parts.append(f'<text x="{WIDTH - 70}" y="{height - 4}">{(stop - start) * 1e3:.1f} ms</text>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="timeline">'
        f"{''.join(parts)}</svg>"
    )


def _table(uses: Sequence[TrackUse]) -> str:
    kinds = [k for k in COLOURS if any(k in use.parts for use in uses)]
    head = "".join(f"<th>{kind}</th>" for kind in kinds)
    rows = "".join(
        f"<tr><td>{html.escape(use.track)}</td>"
        + "".join(
            f"<td>{use.parts[k] * 100:.1f} %</td>" if k in use.parts else "<td></td>" for k in kinds
        )
        + "</tr>"
        for use in uses
    )
    return f"<table><tr><th></th>{head}</tr>{rows}</table>"
