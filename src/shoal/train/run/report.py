"""A page about a training: the loss, and how the time of a step was used. One file, no scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal import plots
from shoal.train.group.timeline import Span

COLOURS = {
    "compute": plots.BLUE, "forward": plots.SKY, "backward": plots.BLUE,
    "exchange": plots.ORANGE, "loading": plots.GREEN, "checkpoint": plots.PURPLE,
    "optimizer": plots.VERMILION, "idle": "#cccccc",
}  # fmt: skip
#: Longer names for the legend.
NAMES = {"idle": "idle (bubbles, waiting)", "loading": "loading (the program waits for data)"}
WORK = ("compute", "forward", "backward")
WIDTH, PLOT_HEIGHT, ROW, LEFT = 900, 260, 22, 70
TRACK_LEFT = 150  # where the timeline's bars begin
SHOWN_STEPS = 4
POINTS_MAX = 2000


@dataclass(frozen=True, slots=True)
class TrackUse:
    """How a track's time was used, in fractions of the whole."""

    track: str
    fractions: dict[str, float]  # by kind; "idle" is the rest (bubbles, waiting)


def usage(spans: Sequence[Span]) -> list[TrackUse]:
    """Return the fractions of compute, exchange, loading and waiting of each track."""
    if not spans:
        return []
    start, stop = min(s.start_s for s in spans), max(s.stop_s for s in spans)
    whole = max(stop - start, 1e-9)
    uses = []
    for track in sorted({s.track for s in spans}):
        found = {}
        for kind in sorted({s.kind for s in spans if s.track == track}):
            found[kind] = _covered([s for s in spans if (s.track, s.kind) == (track, kind)]) / whole
        busy = _covered([s for s in spans if s.track == track]) / whole
        found["idle"] = max(0.0, 1 - busy)
        uses.append(TrackUse(track, found))
    return uses


def _covered(spans: Sequence[Span]) -> float:
    """Return the seconds in which at least one of the spans runs."""
    total, until = 0.0, -math.inf
    for span in sorted(spans, key=lambda s: s.start_s):
        total += max(0.0, span.stop_s - max(span.start_s, until))
        until = max(until, span.stop_s)
    return total


def last_steps(spans: Sequence[Span], count: int = SHOWN_STEPS) -> list[Span]:
    """Return the spans of the last complete steps in a row.

    A pipeline is timed in detail in some steps only. Those are shown, for they show its bubbles.
    """
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
    """Write the page."""
    shown = last_steps(spans)
    legend = plots.legend(
        (NAMES.get(kind, kind), colour)
        for kind, colour in COLOURS.items()
        if kind == "idle" or any(s.kind == kind for s in spans)
    )
    body = f"""<p>{_summary(losses, validation)}</p>
<h2>Loss</h2>{_loss_plot(losses, validation)}
<h2>{_timeline_title(shown)}</h2>{legend}{_timeline_plot(shown)}
<h2>Use of the time</h2>
<p>Fractions of the time that the timeline shows, for each device and activity.</p>
{_table(usage(shown))}
"""
    Path(path).write_text(plots.page(title, body))


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

    body = []
    for y in plots.ticks(low, high):
        body.append(plots.line((LEFT, py(y)), (WIDTH - 20, py(y))))
        body.append(plots.text(LEFT - 6, py(y) + 4, f"{y:.3g}", "end"))
    body += [plots.text(px(x), PLOT_HEIGHT - 32, f"{x:g}", "middle") for x in plots.ticks(0, right)]
    body.append(plots.text(WIDTH / 2, PLOT_HEIGHT - 8, "step", "middle"))
    body.append(plots.text(4, PLOT_HEIGHT / 2 - 20, "loss"))
    body.append(plots.polyline([(px(x), py(y)) for x, y in points], plots.BLUE))
    body += [_dot(px(x), py(y), y) for x, y in checks]
    key = "<p>The line is the loss of each step; dots are validation losses.</p>" if checks else ""
    return key + plots.svg(WIDTH, PLOT_HEIGHT, body, "loss by step")


def _dot(x: float, y: float, value: float) -> str:
    title = f"<title>validation {value:.4g}</title>"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{plots.VERMILION}">{title}</circle>'


def _timeline_title(spans: Sequence[Span]) -> str:
    if not spans:
        return "Timeline"
    return f"Timeline of steps {min(s.step for s in spans)} to {max(s.step for s in spans)}"


def _timeline_plot(spans: Sequence[Span]) -> str:
    if not spans:
        return "<p>No spans.</p>"
    tracks = sorted({s.track for s in spans})
    start, stop = min(s.start_s for s in spans), max(s.stop_s for s in spans)
    scale = (WIDTH - TRACK_LEFT - 10) / max(stop - start, 1e-9)
    height = ROW * len(tracks) + 36
    body = []
    for row, track in enumerate(tracks):
        whole = WIDTH - TRACK_LEFT - 10, ROW - 6
        body.append(plots.text(0, row * ROW + 14, track[:24]))
        body.append(plots.rect((TRACK_LEFT, row * ROW + 3), whole, COLOURS["idle"]))
    for span in spans:
        corner = TRACK_LEFT + (span.start_s - start) * scale, tracks.index(span.track) * ROW + 3
        size = max(0.4, span.seconds * scale), ROW - 6
        tip = f"{span.kind}, step {span.step}: {span.seconds * 1e3:.2f} ms"
        body.append(plots.rect(corner, size, COLOURS.get(span.kind, plots.GREY), tip))
    for ms in plots.ticks(0, (stop - start) * 1e3):
        body.append(plots.text(TRACK_LEFT + ms / 1e3 * scale, height - 20, f"{ms:g}", "middle"))
    body.append(plots.text((TRACK_LEFT + WIDTH) / 2, height - 4, "time, ms", "middle"))
    return plots.svg(WIDTH, height, body, "timeline")


def _table(uses: Sequence[TrackUse]) -> str:
    kinds = [k for k in COLOURS if any(k in use.fractions for use in uses)]
    return plots.table(
        ["", *(NAMES.get(kind, kind) for kind in kinds)],
        [
            [use.track, *(f"{use.fractions[k]:.1%}" if k in use.fractions else "" for k in kinds)]
            for use in uses
        ],
    )
