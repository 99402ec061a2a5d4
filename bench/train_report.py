"""The table of docs/training.md, from bench/results/train.json. Measures nothing.

    python -m bench.train_report

A test holds the page to what this prints.
"""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "train.json"
MODELS = ("CNN", "GPT", "MLP")
#: Rows of the table: what they say, which devices, and what the results call them.
ROWS = (
    ("ceiling: two processes that exchange nothing", "equal", "two independent processes"),
    ("the same, waiting for each other after every step", "equal", "two processes in step"),
    ("DDP", "equal", "DDP"),
    ("FSDP2", "equal", "FSDP2"),
    ("`torch.distributed.pipelining`, 1F1B", "equal", "pipelining 1F1B"),
    ("one shoal device", "equal", "one shoal device"),
    ("**two groups**", "equal", "data parallel"),
    ("**two stages**", "equal", "two stages"),
    ("speeds 1 and 0.45: ceiling", "unequal", "two independent processes"),
    ("speeds 1 and 0.45: ceiling, waiting", "unequal", "two processes in step"),
    ("speeds 1 and 0.45: DDP, equal batches", "unequal", "DDP"),
    ("speeds 1 and 0.45: **two groups**", "unequal", "data parallel"),
    ("speeds 1 and 0.45: **two stages**", "unequal", "two stages"),
)


def table() -> list[str]:
    """Speed against one process, with quartiles; groups also against the ceiling."""
    tables = json.loads(RESULTS.read_text())["tables"]
    lines = []
    for text, devices, name in ROWS:
        cells = []
        for model in MODELS:
            row = tables[f"{model}, {devices}"][name]
            cell = f"{row['speed']:.2f} ({row['speed_q1']:.2f} to {row['speed_q3']:.2f})"
            if name in ("data parallel", "DDP", "two processes in step"):
                cell += f", {row['of_ceiling']:.2f} of the ceiling"
            cells.append(cell)
        lines.append(f"| {text} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
