"""A run as one HTML file: Gantt of devices, distribution of completion times, gap over time.

Self-contained: inline SVG and a few lines of script, no network. Colours are those of Okabe and
Ito, which people with any colour vision can tell apart.
"""

from __future__ import annotations

import html

import numpy as np

from shoal.schedule.model.throughputs import Floats
from shoal.schedule.simulate.metrics import Figures
from shoal.schedule.simulate.simulator import Result

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#999999")
WIDTH, MARGIN = 960, 70
#: Devices and bars drawn; a larger pool is sampled evenly and says so.
GANTT_DEVICES_MAX = 96
GANTT_BARS_MAX = 20_000

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:1040px;margin:2rem auto;padding:0 1rem;
color:#222;background:#fff}}
table{{border-collapse:collapse}}td,th{{padding:.2rem .8rem;text-align:right;border-bottom:1px solid
#ddd}}th:first-child,td:first-child{{text-align:left}}
svg{{display:block;margin:.5rem 0 2rem}}text{{font:12px system-ui,sans-serif;fill:#444}}
rect.bar:hover{{stroke:#000;stroke-width:1.5}}
#tip{{position:fixed;background:#222;color:#fff;padding:.2rem .5rem;border-radius:4px;
font-size:13px;pointer-events:none;display:none}}
@media(prefers-color-scheme:dark){{body{{background:#181818;color:#ddd}}text{{fill:#bbb}}
td,th{{border-color:#444}}}}
</style></head><body><h1>{title}</h1>{body}<div id="tip"></div><script>
const tip=document.getElementById("tip");
document.addEventListener("mousemove",e=>{{const t=e.target.dataset&&e.target.dataset.tip;
tip.style.display=t?"block":"none";if(t){{tip.textContent=t;
tip.style.left=Math.min(e.clientX+12,innerWidth-260)+"px";tip.style.top=e.clientY+14+"px"}}}});
</script></body></html>
"""


def page(runs: list[tuple[Figures, Result]], title: str) -> str:
    """The HTML of one or more runs; the first is drawn in full."""
    figures, result = runs[0]
    parts = [
        _table([f for f, _ in runs]),
        f"<h2>Devices over time ({html.escape(figures.policy)})</h2>",
        _gantt(result),
        "<h2>Completion times</h2><p>Share of tasks that are finished within a time.</p>",
        _completions([(f.policy, r.completions_s) for f, r in runs]),
        "<h2>Decisions</h2><p>Tasks that wait at each round, and the gap of each decision to its "
        "bound, in per cent.</p>",
        _rounds(result),
    ]
    return _PAGE.format(title=html.escape(title), body="\n".join(parts))


def _table(all_figures: list[Figures]) -> str:
    head = (
        "policy", "average h", "p99 h", "makespan h", "use", "worst ratio", "restarts", "solve ms",
    )  # fmt: skip
    rows = ["<tr>" + "".join(f"<th>{name}</th>" for name in head) + "</tr>"]
    for f in all_figures:
        cells = (
            html.escape(f.policy),
            f"{f.average_completion_s / 3600:.2f}",
            f"{f.p99_completion_s / 3600:.2f}",
            f"{f.makespan_s / 3600:.2f}",
            f"{f.utilisation:.0%}",
            f"{f.worst_finish_ratio:.2f}",
            str(f.restarts),
            f"{f.solve_mean_s * 1e3:.0f}",
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    bounds = all_figures[0].bounds
    if bounds is not None:
        average, makespan = bounds["average_completion_s"], bounds["makespan_s"]
        rows.append(
            f"<tr><td>lower bound</td><td>{average / 3600:.2f}</td><td></td>"
            f"<td>{makespan / 3600:.2f}</td><td colspan=4></td></tr>"
        )
    return "<table>" + "".join(rows) + "</table>"


def _axis(height: float, end_s: float) -> str:
    """Ticks of a time axis below the plot."""
    hours = end_s / 3600
    step = 10 ** np.floor(np.log10(max(hours, 1e-6)))
    step = step / 2 if hours / step < 4 else step
    marks = []
    for tick in np.arange(0, hours * 1.0001, step):
        x = MARGIN + (WIDTH - MARGIN - 10) * tick / hours
        marks.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" stroke="#8884"/>'
            f'<text x="{x:.1f}" y="{height + 16}" text-anchor="middle">{tick:g} h</text>'
        )
    return "".join(marks)


def _svg(height: float, body: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height + 24:.0f}" width="100%" role="img">{body}</svg>'


def _gantt(result: Result) -> str:
    devices = [(kind.name, n) for kind in result.pool.kinds for n in range(kind.count)]
    chosen = np.unique(
        np.linspace(0, len(devices) - 1, min(len(devices), GANTT_DEVICES_MAX)).astype(int)
    )
    line_of = {int(device): line for line, device in enumerate(chosen)}
    start_s, end_s = min(t.arrival_s for t in result.tasks), float(result.finishes_s.max())
    line_height = 12 if len(chosen) <= 48 else 8
    height = line_height * len(chosen)
    colour_of = {kind: i for i, kind in enumerate(sorted({t.type for t in result.tasks}))}
    scale = (WIDTH - MARGIN - 10) / (end_s - start_s)
    bars = [_axis(height, end_s - start_s)]
    for span in result.spans[:GANTT_BARS_MAX]:
        names = " + ".join(result.tasks[i].name for i in span.tasks)
        from_h, to_h = (span.start_s - start_s) / 3600, (span.end_s - start_s) / 3600
        tip = f"{names}: {from_h:.2f} to {to_h:.2f} h"
        share = (line_height - 2) / len(span.tasks)
        for device in span.devices:
            if device not in line_of:
                continue
            for place, task in enumerate(span.tasks):
                colour = COLOURS[colour_of[result.tasks[task].type] % len(COLOURS)]
                bars.append(
                    f'<rect class="bar" x="{MARGIN + (span.start_s - start_s) * scale:.1f}" '
                    f'y="{line_of[device] * line_height + place * share:.1f}" '
                    f'width="{max(0.3, (span.end_s - span.start_s) * scale):.1f}" '
                    f'height="{share:.1f}" fill="{colour}" data-tip="{html.escape(tip)}"/>'
                )
    for device in chosen:
        name, number = devices[device]
        if number == 0 or line_of[int(device)] == 0:
            y = line_of[int(device)] * line_height + 10
            bars.append(f'<text x="4" y="{y}">{html.escape(name)}</text>')
    note = "" if len(chosen) == len(devices) else f"<p>{len(chosen)} of {len(devices)} devices.</p>"
    return _svg(height, "".join(bars)) + note


def _completions(series: list[tuple[str, Floats]]) -> str:
    height = 260.0
    end_s = max(float(values.max()) for _, values in series)
    body = [_axis(height, end_s)]
    for number, (name, values) in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        ordered = np.sort(values)
        shares = np.arange(1, len(ordered) + 1) / len(ordered)
        points = _points(ordered, shares, end_s, 1.0, height)
        body.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        body.append(
            f'<text x="{WIDTH - 130}" y="{height - 12 - 16 * number:.0f}" '
            f'style="fill:{colour}">{html.escape(name)}</text>'
        )
    body.append('<text x="4" y="12">100 %</text>')
    return _svg(height, "".join(body))


def _points(x: Floats, y: Floats, x_max: float, y_max: float, height: float) -> str:
    step = max(1, len(x) // 2000)
    return " ".join(
        f"{MARGIN + (WIDTH - MARGIN - 10) * a / x_max:.1f},{height - height * b / y_max:.1f}"
        for a, b in zip(x[::step], y[::step], strict=True)
    )


def _rounds(result: Result) -> str:
    height = 200.0
    start_s = result.rounds[0].start_s
    times = np.array([r.start_s - start_s for r in result.rounds])
    end_s = max(float(times.max()), 1.0)
    waiting = np.array([float(r.waiting) for r in result.rounds])
    gaps = np.array([100 * r.gap if r.gap is not None else 0.0 for r in result.rounds])
    gaps = np.where(np.isfinite(gaps), gaps, 0.0)
    most, worst = max(1.0, float(waiting.max())), max(0.1, float(gaps.max()))
    waits, gap_line = (
        _points(times, waiting, end_s, most, height),
        _points(times, gaps, end_s, worst, height),
    )
    return _svg(
        height,
        _axis(height, end_s)
        + f'<polyline points="{waits}" fill="none" stroke="{COLOURS[0]}" stroke-width="1.5"/>'
        f'<polyline points="{gap_line}" fill="none" stroke="{COLOURS[3]}" stroke-width="1.5"/>'
        f'<text x="4" y="12" style="fill:{COLOURS[0]}">{most:.0f} wait</text>'
        f'<text x="4" y="28" style="fill:{COLOURS[3]}">{worst:.2g} % gap</text>',
    )
