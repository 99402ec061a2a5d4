"""The tables of docs/network.md, from bench/results/network.json. Measures nothing.

    python -m bench.network_report

writes them between the page's markers; a test holds the page to that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from bench.figures import RESULTS, Figure, Run, number
from bench.report import ROOT, VERDICT, describe_machine, duration, ratio_range, target

PAGE = ROOT / "docs" / "network.md"
BEGIN = "<!-- {}: begin (written by `python -m bench.network_report`) -->"
END = "<!-- {}: end -->"
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
    """One line for each transfer: its rate, and that over either socket's."""
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
    """The lines of each table, by the name of its markers."""
    groups = {key: list(fs) for key, fs in groupby(run.figures, key=lambda f: f.group)}
    made = {"machine": [f"{describe_machine(run)}."]}
    if "step" in groups:
        made["step"] = list(steps(groups["step"]))
    if "bandwidth" in groups:
        made["bandwidth"] = list(copies(groups["bandwidth"]))
    if "delay" in groups:
        made["delay"] = list(delays(groups["delay"]))
    narrow = groups.get("narrow", [])
    if narrow:
        made["narrow"] = list(copies([f for f in narrow if "socket" in f.what]))
        made["narrow steps"] = list(steps([f for f in narrow if "socket" not in f.what]))
    return made


def filled(page: str, run: Run) -> str:
    """The page with all tables in their places."""
    for name, lines in tables(run).items():
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"the page has no place for the table {name!r}")
        page = before + "\n".join([begin, "", *lines, "", end]) + after
    return page


def main(page: Path = PAGE) -> None:
    page.write_text(filled(page.read_text(), Run.load(RESULTS / "network.json")))


if __name__ == "__main__":
    main()
