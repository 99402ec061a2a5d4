"""A run as one HTML page: Gantt of devices, distribution of completion times, gap over time."""

from __future__ import annotations

import html
from collections.abc import Iterator

import numpy as np

from shoal import plots
from shoal.plots import COLOURS
from shoal.schedule.model.throughputs import Floats
from shoal.schedule.simulate.metrics import Figures
from shoal.schedule.simulate.simulator import Result

WIDTH, MARGIN = 960, 70
#: Devices and bars drawn; a larger pool is sampled evenly and says so.
GANTT_DEVICES_MAX = 96
GANTT_BARS_MAX = 20_000
POINTS_MAX = 2000


def page(runs: list[tuple[Figures, Result]], title: str) -> str:
    """Return the HTML of one or more runs; the first is drawn in full."""
    figures, result = runs[0]
    sections = [
        _table([f for f, _ in runs]),
        f"<h2>Devices over time ({html.escape(figures.policy)})</h2>",
        _gantt(result),
        "<h2>Completion times</h2><p>Fraction of tasks that are finished within a time.</p>",
        _completions([(f.policy, r.completions_s) for f, r in runs]),
        "<h2>Decisions</h2><p>Tasks that wait at each round, and the gap of each decision to its "
        "bound, in percent.</p>",
        _rounds(result),
    ]
    return plots.page(title, "\n".join(sections))


def _table(all_figures: list[Figures]) -> str:
    rows = [
        (
            f.policy,
            f"{f.average_completion_s / 3600:.2f}",
            f"{f.p99_completion_s / 3600:.2f}",
            f"{f.makespan_s / 3600:.2f}",
            f"{f.utilisation:.0%}",
            f"{f.worst_finish_ratio:.2f}",
            str(f.restarts),
            f"{f.solve_mean_s * 1e3:.0f}",
        )
        for f in all_figures
    ]
    bounds = all_figures[0].bounds
    if bounds is not None:
        average, makespan = bounds["average_completion_s"] / 3600, bounds["makespan_s"] / 3600
        rows.append(("lower bound", f"{average:.2f}", "", f"{makespan:.2f}", "", "", "", ""))
    head = (
        "policy", "average h", "p99 h", "makespan h", "use", "worst ratio", "restarts", "solve ms",
    )  # fmt: skip
    return plots.table(head, rows)


def _x(time_s: float, end_s: float) -> float:
    return MARGIN + (WIDTH - MARGIN - 10) * time_s / end_s


def _axis(height: float, end_s: float) -> list[str]:
    """Return the ticks of a time axis below the plot."""
    marks = []
    for hour in plots.ticks(0, end_s / 3600):
        x = _x(hour * 3600, end_s)
        marks.append(plots.line((x, 0), (x, height)))
        marks.append(plots.text(x, height + 16, f"{hour:g} h", "middle"))
    return marks


def _gantt(result: Result) -> str:
    devices = [(kind.name, n) for kind in result.pool.kinds for n in range(kind.count)]
    chosen = np.unique(
        np.linspace(0, len(devices) - 1, min(len(devices), GANTT_DEVICES_MAX)).astype(int)
    )
    row_of = {int(device): row for row, device in enumerate(chosen)}
    start_s, end_s = min(t.arrival_s for t in result.tasks), float(result.finishes_s.max())
    row_height = 12 if len(chosen) <= 48 else 8
    height = row_height * len(chosen)
    colour_of = {kind: i for i, kind in enumerate(sorted({t.type for t in result.tasks}))}
    body = _axis(height, end_s - start_s)
    for span in result.spans[:GANTT_BARS_MAX]:
        names = " + ".join(result.tasks[i].name for i in span.tasks)
        left, right = span.start_s - start_s, span.end_s - start_s
        tip = f"{names}: {left / 3600:.2f} to {right / 3600:.2f} h"
        x, bar_height = _x(left, end_s - start_s), (row_height - 2) / len(span.tasks)
        width = max(0.3, _x(right, end_s - start_s) - x)
        for device in span.devices:
            if device not in row_of:
                continue
            for i, task in enumerate(span.tasks):
                colour = COLOURS[colour_of[result.tasks[task].type] % len(COLOURS)]
                y = row_of[device] * row_height + i * bar_height
                body.append(plots.rect((x, y), (width, bar_height), colour, tip))
    for device in chosen:
        name, number = devices[device]
        if number == 0 or row_of[int(device)] == 0:
            body.append(plots.text(4, row_of[int(device)] * row_height + 10, name))
    note = "" if len(chosen) == len(devices) else f"<p>{len(chosen)} of {len(devices)} devices.</p>"
    return plots.svg(WIDTH, height + 24, body, "devices over time") + note


def _completions(series: list[tuple[str, Floats]]) -> str:
    height = 260.0
    end_s = max(float(values.max()) for _, values in series)
    body = _axis(height, end_s)
    for number, (name, values) in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        ordered = np.sort(values)
        fractions = np.arange(1, len(ordered) + 1) / len(ordered)
        points = _points(ordered, fractions, end_s, 1.0, height)
        body.append(plots.polyline(points, colour, 2))
        body.append(plots.text(WIDTH - 130, height - 12 - 16 * number, name, colour=colour))
    body.append(plots.text(4, 12, "100 %"))
    return plots.svg(WIDTH, height + 24, body, "completion times")


def _points(
    x: Floats, y: Floats, x_max: float, y_max: float, height: float
) -> Iterator[tuple[float, float]]:
    step = max(1, len(x) // POINTS_MAX)
    for a, b in zip(x[::step], y[::step], strict=True):
        yield _x(a, x_max), height - height * b / y_max


def _rounds(result: Result) -> str:
    height = 200.0
    start_s = result.rounds[0].start_s
    times = np.array([r.start_s - start_s for r in result.rounds])
    end_s = max(float(times.max()), 1.0)
    waiting = np.array([float(r.waiting) for r in result.rounds])
    gaps = np.array([100 * r.gap if r.gap is not None else 0.0 for r in result.rounds])
    gaps = np.where(np.isfinite(gaps), gaps, 0.0)
    most, worst = max(1.0, float(waiting.max())), max(0.1, float(gaps.max()))
    body = [
        *_axis(height, end_s),
        plots.polyline(_points(times, waiting, end_s, most, height), plots.BLUE),
        plots.polyline(_points(times, gaps, end_s, worst, height), plots.VERMILION),
        plots.text(4, 12, f"{most:.0f} wait", colour=plots.BLUE),
        plots.text(4, 28, f"{worst:.2g} % gap", colour=plots.VERMILION),
    ]
    return plots.svg(WIDTH, height + 24, body, "waiting tasks and gap over time")
