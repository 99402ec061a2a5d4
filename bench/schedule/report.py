"""Make the tables of docs/figures.md about scheduling. Measures nothing."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from typing import Any

from bench.figures import RESULTS

TRACES = ("max_min_fairness", "minimize_makespan")
FIGURES = ("average_h", "p99_h", "makespan_h", "worst_ratio")
#: Rows of the tables, and what the results call them.
POLICIES = {
    "`fifo`": "fifo",
    "`fifo-fast`": "fifo-fast",
    "`las`": "las",
    "`allox`": "allox",
    "`max-min` (heterogeneity-aware LAS)": "max-min",
    "`max-min-packed`": "max-min-packed",
    "`finish-time`": "finish-time",
    "`makespan`": "makespan",
    "`makespan-packed`": "makespan-packed",
    "**`shoal`** (balance 0.3, the default)": "shoal, balance 0.3",
    "`shoal`, balance 0": "shoal, balance 0",
    "`shoal`, balance 0.1": "shoal, balance 0.1",
    "`shoal`, balance 1": "shoal, balance 1",
}
RESTARTED = {
    "`max-min`": "max-min",
    "`max-min-packed`": "max-min-packed",
    "`finish-time`": "finish-time",
    "**`shoal`**": "shoal, balance 0.3",
}
LIMITS = {
    "exist at all": (2, False, False),
    "end by the makespan that was aimed at, 16.7 / 16.3": (2, True, False),
    "and start tasks at the rounds of 360 s": (2, True, True),
    "and run three on a device, at speeds predicted from pairs": (3, True, True),
}

Row = dict[str, Any]


def load(name: str) -> list[Row]:
    """The rows of a results file; none if the command has not been run."""
    path = RESULTS / f"schedule-{name}.json"
    rows: list[Row] = json.loads(path.read_text()) if path.exists() else []
    return rows


def gavel(policies: dict[str, str], restart_cost_s: float) -> Iterator[str]:
    """`bench.schedule gavel`: average / p99 / makespan and worst ratio, T1 and T2."""
    found = {
        (row["trace"], row["policy"]): row
        for row in load("gavel")
        if row.get("restart_cost_s") == restart_cost_s
    }
    for title, policy in policies.items():
        cells = []
        for trace in TRACES:
            row = found[trace, policy]
            figures = f"{row['average_h']:.2f} / {row['p99_h']:.1f} / {row['makespan_h']:.1f}"
            cells += [f"**{figures}**" if "**" in title else figures, f"{row['worst_ratio']:.2f}"]
        yield _line(title, *cells)


def bounds() -> Iterator[str]:
    """`limits` and `makespans`: the last line of the table of policies."""
    average = {r["trace"]: r["average_at_least_h"] for r in reversed(load("limits"))}
    makespan = {
        r["trace"]: r["makespan_at_least_h"] for r in load("makespans") if r["on_a_device"] == 2
    }
    cells = [f"{average[t]:.3f}; makespan {makespan[t]:.2f}" for t in TRACES]
    yield _line("lower bound (two on a device)", cells[0], "", cells[1], "")


def limits() -> Iterator[str]:
    """`bench.schedule limits`: what no schedule can reach."""
    found = {
        (r["trace"], r["on_a_device"], bool(r["makespan_at_most_h"]), bool(r["rounds_s"])): r
        for r in load("limits")
    }
    for title, key in LIMITS.items():
        yield _line(title, *(f"{found[t, *key]['average_at_least_h']:.3f}" for t in TRACES))


def seeds() -> Iterator[str]:
    """`bench.schedule seeds`: medians of `shoal` against the best baseline of each figure."""
    rows = load("seeds")
    for world, per_hour in dict.fromkeys((r["world"], r["per_hour"]) for r in rows):
        mine = [r for r in rows if (r["world"], r["per_hour"]) == (world, per_hour)]
        when = "all at once" if per_hour == 0 else f"{per_hour:g} an hour"
        cells = []
        for figure in FIGURES:
            ratios = [r[figure] / r[f"{figure}_best"] for r in mine]
            cells.append(
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        yield _line(f"{world}, {when}", *cells)


def scale() -> Iterator[str]:
    """`bench.schedule scale`: CPU time of one decision."""
    for row in load("scale"):
        if "week" not in row:
            yield _line(
                f"{row['waiting']:,}", f"{row['devices']:,}", f"{row['cpu_median_s']:.2f} s",
                f"{row['cpu_max_s']:.2f} s", f"{row['gap_max']:.2%}",
            )  # fmt: skip


def week() -> Iterator[str]:
    """`bench.schedule scale`: a week of arrivals, simulated."""
    (row,) = [row for row in load("scale") if "week" in row]
    yield _line("devices", f"{row['devices']:,}")
    yield _line("tasks", f"{row['tasks']:,}")
    yield _line("rounds", f"{row['rounds']:,}")
    yield _line("processor time", f"{row['cpu_s']:.0f} s")
    yield _line("memory", f"{row['memory_mib']} MiB")
    yield _line("a decision, median", f"{row['solve_median_s']:.2f} s")
    yield _line("a decision, 99th percentile", f"{row['solve_p99_s']:.2f} s")


def predictions() -> Iterator[str]:
    """`bench.schedule predict`: errors of predicted speeds."""
    for row in load("predict"):
        if "task" in row:
            errors = (row["error_cpu-0.5"], row["error_cpu-0.25"], row["roofline_error"])
            yield _line(row["task"], *(f"{error:+.0%}" for error in errors))


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells).replace("|  |", "| |").rstrip() + " |"


def _table(head: str, lines: Iterator[str]) -> list[str]:
    """Return the table under its heading: text to the left, every other column to the right."""
    columns = head.split(" | ")
    return [_line(*columns), "|---|" + "---:|" * (len(columns) - 1), *lines]


def tables() -> dict[str, list[str]]:
    """Return the tables of docs/figures.md, by name."""
    both = "policy | T1 | ratio | T2 | ratio"
    policies = _table(both, gavel(POLICIES, 0.0))
    return {
        "schedule: gavel": [*policies, *bounds()],
        "schedule: restarts": _table(both, gavel(RESTARTED, 60.0)),
        "schedule: limits": _table("schedules that … | T1 (aim 3.0) | T2 (aim 6.05)", limits()),
        "schedule: seeds": _table("world | average | p99 | makespan | worst ratio", seeds()),
        "schedule: scale": _table("waiting tasks | devices | median | longest | gap", scale()),
        "schedule: week": _table("a week of arrivals | ", week()),
        "schedule: predictions": _table(
            "task | at speed 0.5 | at speed 0.25 | bare roofline", predictions()
        ),
    }
