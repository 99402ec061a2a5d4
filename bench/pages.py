"""Write the tables of docs/figures.md and README.md from bench/results. Measures nothing.

    python -m bench.pages

A table stands between two comments that name it. A test holds both pages to the results.
"""

from __future__ import annotations

import re
from pathlib import Path

from bench import loading_report, memory_report, network_report, report, schedule_report
from bench import train_report as train
from bench.figures import RESULTS, Run, number

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "figures.md")
PLACE = re.compile(r"<!-- table: ([^>\n]+) -->\n.*?<!-- end of table -->", re.DOTALL)


def summary(device: Run, network: Run) -> list[str]:
    """Return the five figures of README.md."""

    def ratio(run: Run, group: str, name: str) -> str:
        (found,) = [f for f in run.figures if (f.group, f.name) == (group, name)]
        return number(found.ratio.median)

    unequal = train.load("train")["tables"]["GPT, unequal"]
    ours, ddp = (f"{unequal[name]['of_ceiling']:.2f}" for name in ("data parallel", "DDP"))
    mean = ratio(device, "training", "geometric mean")
    item = ratio(device, "operators", "item()")
    upload = ratio(device, "transfers", "16 MiB to the device, pinned")
    tcp = ratio(network, "step", "GPT medium, TCP")
    return [
        "| Measurement | Shoal | Compared to |",
        "|---|---:|---|",
        f"| Training step, geometric mean of 8 models | {mean} × the time | local torch |",
        f"| `.item()` | {item} × the time | local torch |",
        f"| 16 MiB upload from pinned memory | {upload} × the speed | `memcpy` |",
        f"| GPT-medium step over TCP and TLS, loopback | {tcp} × the time | local torch |",
        f"| GPT training, devices of speed 1 and 0.45 | {ours} of the ceiling "
        f"| DDP, equal split: {ddp} |",
    ]


def tables() -> dict[str, list[str]]:
    """Return every table of both pages, by name."""
    device, network = Run.load(RESULTS / "device.json"), Run.load(RESULTS / "network.json")
    return {
        "summary": summary(device, network),
        **report.tables(device),
        **network_report.tables(network),
        **memory_report.tables(memory_report.load()),
        **train.tables(),
        "train: loading": loading_report.lines(loading_report.load()),
        **schedule_report.tables(),
    }


def filled(page: str, made: dict[str, list[str]]) -> str:
    """Return the page with every table in its place."""

    def table(place: re.Match[str]) -> str:
        name = place[1]
        if name not in made:
            raise ValueError(f"no table is called {name!r}; there are {', '.join(made)}")
        return "\n".join([f"<!-- table: {name} -->", "", *made[name], "", "<!-- end of table -->"])

    return PLACE.sub(table, page)


def main() -> None:
    made = tables()
    for page in PAGES:
        page.write_text(filled(page.read_text(), made))


if __name__ == "__main__":
    main()
