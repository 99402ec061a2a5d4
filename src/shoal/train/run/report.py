"""A page about a training: the loss, and where the time of a step went. One file, no scripts."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.train.group.timeline import Span

#: Distinct for people who see colours differently, and on light and dark screens.
COLOURS = {
    "compute": "#0072b2", "forward": "#56b4e9", "backward": "#0072b2", "exchange": "#e69f00",
    "loading": "#009e73", "checkpoint": "#cc79a7", "optimizer": "#d55e00", "idle": "#cccccc",
}  # fmt: skip
#: What a reader calls a kind, where that is more than one word.
NAMES = {"idle": "idle (bubbles, waiting)", "loading": "loading (the program waits for data)"}
WORK = ("compute", "forward", "backward")
WIDTH, PLOT_HEIGHT, ROW, LEFT = 900, 260, 22, 70
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
    """The spans of the last whole steps in a row; the very last one may still be incomplete. A pipeline
    is timed in detail now and then: those steps are shown, for they show its bubbles."""
    steps = {s.step for s in spans}
    detailed = {s.step for s in spans if s.kind == "forward"} or steps
    runs: list[list[int]] = []
    for step in sorted(detailed - {max(steps, default=0)} or detailed):
        if runs and runs[-1][-1] == step - 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    enough = min(count, max(map(len, runs), default=0))
    shown = next((run[-count:] for run in reversed(runs) if len(run) >= enough), [])
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
        f'<span class="key"><i style="background:{colour}"></i>{NAMES.get(kind, kind)}</span>'
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
<h2>{_timeline_title(shown)}</h2><p>{legend}</p>{_timeline_plot(shown)}
<h2>Use of the time</h2>
<p>Parts of the time that the timeline shows, for each device and activity.</p>
{_table(usage(shown))}
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

    def px(x: float) -> float:
        return LEFT + x / right * (WIDTH - LEFT - 20)

    def py(y: float) -> float:
        return 10 + (high - y) / ((high - low) or 1) * (PLOT_HEIGHT - 60)

    line = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in points)
    dots = "".join(_dot(px(x), py(y), y) for x, y in checks)
    axes = "".join(_level(py(y), f"{y:.3g}") for y in ticks(low, high))
    axes += "".join(
        f'<text x="{px(x):.1f}" y="{PLOT_HEIGHT - 32}" text-anchor="middle">{x:g}</text>'
        for x in ticks(0, right)
    )
    axes += _titles("step", "loss", PLOT_HEIGHT)
    key = "<p>The line is the loss of each step; dots are validation losses.</p>" if checks else ""
    return (
        f'{key}<svg viewBox="0 0 {WIDTH} {PLOT_HEIGHT}" role="img" aria-label="loss by step">{axes}'
        f'<polyline points="{line}" fill="none" stroke="#0072b2" stroke-width="1.5"/>{dots}</svg>'
    )


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers between two values, some five of them.

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


def _level(y: float, text: str) -> str:
    """A horizontal line with its value."""
    return (
        f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#888" '
        f'stroke-width="0.4"/><text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    )


def _titles(across: str, up: str, height: float) -> str:
    """What the axes count."""
    return (
        f'<text x="{WIDTH / 2:.0f}" y="{height - 8}" text-anchor="middle">{across}</text>'
        f'<text x="12" y="{height / 2 - 20:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 12 {height / 2 - 20:.0f})">{up}</text>'
    )


def _dot(x: float, y: float, value: float) -> str:
    title = f"<title>validation {value:.4g}</title>"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#d55e00">{title}</circle>'


def _timeline_title(spans: Sequence[Span]) -> str:
    if not spans:
        return "Timeline"
    return f"Timeline of steps {min(s.step for s in spans)} to {max(s.step for s in spans)}"


def _timeline_plot(spans: Sequence[Span]) -> str:
    if not spans:
        return "<p>No spans.</p>"
    tracks = sorted({s.track for s in spans})
    start, stop = min(s.start_s for s in spans), max(s.stop_s for s in spans)
    scale = (WIDTH - 160) / max(stop - start, 1e-9)
    height = ROW * len(tracks) + 36
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
    for ms in ticks(0, (stop - start) * 1e3):
        x = 150 + ms / 1e3 * scale
        parts.append(f'<text x="{x:.1f}" y="{height - 20}" text-anchor="middle">{ms:g}</text>')
    middle = (150 + WIDTH) / 2
    parts.append(f'<text x="{middle:.0f}" y="{height - 4}" text-anchor="middle">time, ms</text>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="timeline">'
        f"{''.join(parts)}</svg>"
    )


def _table(uses: Sequence[TrackUse]) -> str:
    kinds = [k for k in COLOURS if any(k in use.parts for use in uses)]
    head = "".join(f"<th>{NAMES.get(kind, kind)}</th>" for kind in kinds)
    rows = "".join(
        f"<tr><td>{html.escape(use.track)}</td>"
        + "".join(
            f"<td>{use.parts[k] * 100:.1f} %</td>" if k in use.parts else "<td></td>" for k in kinds
        )
        + "</tr>"
        for use in uses
    )
    return f"<table><tr><th></th>{head}</tr>{rows}</table>"
