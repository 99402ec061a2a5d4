"""Rows of results: printed as they come, and written to bench/results."""

from __future__ import annotations

import json

from bench.figures import RESULTS


def save(name: str, rows: object) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"schedule-{name}.json").write_text(json.dumps(rows, indent=1) + "\n")


def print_row(row: dict[str, object]) -> None:
    print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)
