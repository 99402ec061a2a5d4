"""Make the tables of docs/figures.md about paging. Measures nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bench.figures import RESULTS
from bench.measure import Spread

HEAD = (
    "| program | memory needed / given | time over enough | LRU's | our time over LRU's "
    "| bytes over Belady's | LRU's | LRU's bytes over ours | bytes over the clairvoyant's |",
    "|---|---|---:|---:|---:|---:|---:|---:|---:|",
)


class Case(msgspec.Struct):
    """One program with too little memory."""

    program: str
    factor: float
    peak_bytes: int
    limit_bytes: int
    enough_ms: Spread  # a step with enough memory
    time: Spread  # over that
    lru_time: Spread
    over_lru_time: Spread
    over_optimal: float  # bytes moved
    over_clairvoyant: float
    lru_over_optimal: float
    lru_over_ours: float
    stall_ms: float  # of a step
    lru_stall_ms: float


class Results(msgspec.Struct):
    cases: list[Case]
    two_devices_peer_kib: float  # a step
    two_devices_swapped_kib: float
    peer_copies: dict[str, Spread]  # speed over memcpy's
    rounds: int
    load_before: float


def spread(value: Spread) -> str:
    """The median, and the quartiles around it."""
    return f"{value.median:.2f} ({value.q1:.2f} to {value.q3:.2f})"


def row(case: Case) -> str:
    cells = (
        case.program,
        f"{case.peak_bytes / 2**20:.0f} / {case.limit_bytes / 2**20:.0f} MiB = {case.factor:g}",
        spread(case.time),
        spread(case.lru_time),
        spread(case.over_lru_time),
        f"{case.over_optimal:.2f}",
        f"{case.lru_over_optimal:.2f}",
        f"{case.lru_over_ours:.2f}",
        f"{case.over_clairvoyant:.2f}",
    )
    return "| " + " | ".join(cells) + " |"


def tables(results: Results) -> dict[str, list[str]]:
    """Return the tables of docs/figures.md, by name."""
    return {
        "memory: paging": [*HEAD, *map(row, results.cases)],
        "memory: two devices": [
            "| decoding on two devices that hold the weights together | KiB per token |",
            "|---|---:|",
            f"| copied from device to device | {results.two_devices_peer_kib:.1f} |",
            f"| swapped | {results.two_devices_swapped_kib:.1f} |",
        ],
        "memory: peer copies": [
            "| copy between two devices of one host | speed over memcpy |",
            "|---|---:|",
            *(f"| {size} | {spread(ratio)} |" for size, ratio in results.peer_copies.items()),
        ],
    }


def load(path: Path = RESULTS / "memory.json") -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)
