"""Make the tables of docs/figures.md about the network. Measures nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

from bench.figures import Figure, Run, number
from bench.report import VERDICT, duration, machine, ratio_range, target

RATE = re.compile(r"([\d.]+) GiB/s")


def steps(figures: list[Figure]) -> Iterator[str]:
    yield "| step | local | shoal | shoal / local | quartiles | target | |"
    yield "|---|---:|---:|---:|---:|---:|---|"
    for f in figures:
        yield (
            f"| {f.name} | {duration(f.base_us)} | {duration(f.ours_us)} | {number(f.ratio.median)} "
            f"| {ratio_range(f)} | {target(f)} | {VERDICT[f.meets]} |"
        )


def copies(figures: list[Figure]) -> Iterator[str]:
    """Yield one line per transfer: its rate, and the ratio to either socket's rate."""
    yield "| transfer | plain socket, GiB/s | TLS socket, GiB/s | shoal, GiB/s | / plain | / TLS |"
    yield "|---|---:|---:|---:|---:|---:|"
    found = {f.name: f for f in figures}
    for name, against_plain in found.items():
        way, _, side = name.rpartition(", shoal, ")
        if not way or not side.endswith(" / plain"):
            continue  # a socket, or the other comparison of the same transfer
        kind = side.removesuffix(" / plain")
        against_tls = found[f"{way}, shoal, {kind} / TLS"]
        plain, ours = RATE.findall(against_plain.note)
        secure = RATE.findall(against_tls.note)[0]
        ratios = [number(f.ratio.median) for f in (against_plain, against_tls)]
        yield f"| {way}, {kind} | {plain} | {secure} | {ours} | {ratios[0]} | {ratios[1]} |"


def delays(figures: list[Figure]) -> Iterator[str]:
    yield "| step, round trip | local | shoal | shoal / local | floor | target | |"
    yield "|---|---:|---:|---:|---:|---:|---|"
    for f in figures:
        floor = f.note.rpartition("floor ")[2]
        yield (
            f"| {f.name} | {duration(f.base_us)} | {duration(f.ours_us)} "
            f"| {number(f.ratio.median)} | {floor} | {target(f)} | {VERDICT[f.meets]} |"
        )


def tables(run: Run) -> dict[str, list[str]]:
    """Return the tables of docs/figures.md about the network, by name."""
    groups = {key: list(fs) for key, fs in groupby(run.figures, key=lambda f: f.group)}
    narrow = groups["narrow"]
    return {
        "network: machine": machine(run),
        "network: step": list(steps(groups["step"])),
        "network: bandwidth": list(copies(groups["bandwidth"])),
        "network: delay": list(delays(groups["delay"])),
        "network: narrow": list(copies([f for f in narrow if "socket" in f.what])),
        "network: narrow steps": list(steps([f for f in narrow if "socket" not in f.what])),
    }
