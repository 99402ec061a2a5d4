"""The tables of docs/scheduling.md, from bench/results/schedule-*.json. Measures nothing.

    python -m bench.schedule_report

A test holds the page to what this prints.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
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
    "end by the aim's makespan, 16.7 / 16.3": (2, True, False),
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
    """`bench/schedule.py gavel`: average / p99 / makespan and worst ratio, T1 and T2."""
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
    """`bench/schedule.py limits`: what no schedule can reach."""
    found = {
        (r["trace"], r["on_a_device"], bool(r["makespan_at_most_h"]), bool(r["rounds_s"])): r
        for r in load("limits")
    }
    for title, key in LIMITS.items():
        yield _line(title, *(f"{found[t, *key]['average_at_least_h']:.3f}" for t in TRACES))


def seeds() -> Iterator[str]:
    """`bench/schedule.py seeds`: medians of `shoal` against the best baseline of each figure."""
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
    """`bench/schedule.py scale`: CPU time of one decision."""
    for row in load("scale"):
        if "week" not in row:
            yield _line(
                f"{row['waiting']:,}", f"{row['devices']:,}", f"{row['cpu_median_s']:.2f} s",
                f"{row['cpu_max_s']:.2f} s", f"{row['gap_max']:.2%}",
            )  # fmt: skip


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells).replace("|  |", "| |").rstrip() + " |"


def tables() -> dict[str, list[str]]:
    """Every table, by what it is about."""
    return {
        "gavel": [*gavel(POLICIES, 0.0), *bounds()],
        "gavel, restart cost 60 s": list(gavel(RESTARTED, 60.0)),
        "limits": list(limits()),
        "seeds": list(seeds()),
        "scale": list(scale()),
    }


if __name__ == "__main__":
    for name, lines in tables().items():
        print(f"{name}:", *(lines or ["(no results: run the command)"]), "", sep="\n")
