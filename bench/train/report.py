"""Make the tables of docs/figures.md about training. Measures nothing."""

from __future__ import annotations

import json
import statistics
from typing import Any

from bench.figures import RESULTS

MODELS = ("CNN", "GPT", "MLP")
RATES = ("1", "10")
#: Rows of the table: what they say, which devices, and what the results call them.
ROWS = (
    ("ceiling: two processes that exchange nothing", "equal", "two independent processes"),
    ("the same, but each step waits for both", "equal", "two processes in step"),
    ("DDP", "equal", "DDP"),
    ("FSDP2", "equal", "FSDP2"),
    ("`torch.distributed.pipelining`, 1F1B", "equal", "pipelining 1F1B"),
    ("one shoal device", "equal", "one shoal device"),
    ("**two groups**", "equal", "data parallel"),
    ("**two stages**", "equal", "two stages"),
    ("speeds 1 and 0.45: ceiling", "unequal", "two independent processes"),
    ("speeds 1 and 0.45: ceiling, each step waits", "unequal", "two processes in step"),
    ("speeds 1 and 0.45: DDP, equal batches", "unequal", "DDP"),
    ("speeds 1 and 0.45: **two groups**", "unequal", "data parallel"),
    ("speeds 1 and 0.45: **two stages**", "unequal", "two stages"),
)
HEAD = [f"| speed against one process | {' | '.join(MODELS)} |", "|---|---:|---:|---:|"]


def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def speeds() -> list[str]:
    """Return speed against one process, with quartiles."""
    found = load("train")["tables"]
    lines = list(HEAD)
    for text, devices, name in ROWS:
        rows = [found[f"{model}, {devices}"][name] for model in MODELS]
        cells = [f"{r['speed']:.2f} ({r['speed_q1']:.2f} to {r['speed_q3']:.2f})" for r in rows]
        lines.append(f"| {text} | {' | '.join(cells)} |")
    return lines


def ceilings() -> list[str]:
    """Return the fraction of the ceiling that each way of data parallelism reaches."""
    found = load("train")["tables"]
    lines = [f"| fraction of the ceiling | {' | '.join(MODELS)} |", "|---|---:|---:|---:|"]
    for text, devices, name in ROWS:
        if name in ("data parallel", "DDP", "two processes in step"):
            rows = [found[f"{model}, {devices}"][name] for model in MODELS]
            cells = [f"{r['of_ceiling']:.2f}" for r in rows]
            lines.append(f"| {text} | {' | '.join(cells)} |")
    return lines


def hosts() -> list[str]:
    """Return speed against one process and the fraction of the ceiling, between hosts."""
    found = load("train-hosts")["tables"]
    columns = " | ".join(f"{model} | of ceiling" for model in MODELS)
    lines = [f"| speed against one process | {columns} |", "|---|" + "---:|" * 6]
    for rate in RATES:
        for name, shown in (("DDP", "DDP"), ("two groups", "**two groups**")):
            rows = [found[f"{model}, {rate}gbit"][name] for model in MODELS]
            cells = " | ".join(f"{r['speed']:.2f} | {r['of_ceiling']:.2f}" for r in rows)
            lines.append(f"| {rate} Gbit/s, {shown} | {cells} |")
    return lines


def faults(results: dict[str, dict[str, list[float]]]) -> list[str]:
    """Return how soon a fault is named: the median, and the longest in brackets."""

    def cell(found: dict[str, list[float]], key: str) -> str:
        if key not in found:
            return ""
        return f"{statistics.median(found[key]):.2f} s ({max(found[key]):.2f})"

    return [
        "| worker | named in the log | `GroupLostError`, or the step is done without it |",
        "|---|---:|---:|",
        *(f"| {n} | {cell(f, 'log')} | {cell(f, 'error')} |" for n, f in results.items()),
    ]


def parts() -> list[str]:
    """Return the parts of a step, each measured alone."""
    found = load("train-parts")
    return [
        "| part of a step | ms |",
        "|---|---:|",
        f"| message from the program to two groups and back | {found['controller_ms']:.2f} |",
        f"| 12 MB of gradients summed and returned to two devices | {found['exchange_ms']:.1f} |",
        f"| the same by Gloo, between two processes | {found['gloo_ms']:.1f} |",
        f"| two processes that only add and copy in shared memory | {found['bare_ms']:.1f} |",
    ]


def slowdown() -> list[str]:
    """Return what the groups reach, step by step, after one device lost half of its core."""
    found = load("train-parts")["after_slowdown"]
    return [
        "| step after the slowdown | fraction of the new sum of speeds |",
        "|---|---:|",
        *(f"| {step} | {value:.2f} |" for step, value in enumerate(found, 1)),
    ]


def tables() -> dict[str, list[str]]:
    """Return the tables of docs/figures.md, by name."""
    return {
        "train: speeds": speeds(),
        "train: ceilings": ceilings(),
        "train: hosts": hosts(),
        "train: parts": parts(),
        "train: slowdown": slowdown(),
        "train: faults": faults(load("train-faults")),
    }
