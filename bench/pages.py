"""Write the tables of docs/figures.md and README.md from bench/results. Measures nothing.

    python -m bench.pages

A table stands between two comments that name it. A test holds both pages to the results.
"""

from __future__ import annotations

import re
from pathlib import Path

from bench import report
from bench.figures import RESULTS, Run, number
from bench.loading import report as loading
from bench.memory import report as memory
from bench.network import report as network_report
from bench.schedule import report as schedule
from bench.train import report as train

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
        "| Measurement | Shoal | Compared to | Script |",
        "|---|---:|---|---|",
        f"| Training step, geometric mean of 8 models | {mean} × the time | local torch "
        "| `bench/device/training.py` |",
        f"| `.item()` | {item} × the time | local torch | `bench/device/operators.py` |",
        f"| 16 MiB upload from pinned memory | {upload} × the speed | `memcpy` "
        "| `bench/device/transfers.py` |",
        f"| GPT-medium step over TCP and TLS, loopback | {tcp} × the time | local torch "
        "| `bench/network/__main__.py` |",
        f"| GPT training, devices of speed 1 and 0.45 | {ours} of the ceiling "
        f"| DDP, equal split: {ddp} | `bench/train/__main__.py` |",
    ]


def tables() -> dict[str, list[str]]:
    """Return every table of both pages, by name."""
    device, network = Run.load(RESULTS / "device.json"), Run.load(RESULTS / "network.json")
    return {
        "summary": summary(device, network),
        **report.tables(device),
        **network_report.tables(network),
        **memory.tables(memory.load()),
        **train.tables(),
        "train: loading": loading.lines(loading.load()),
        **schedule.tables(),
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
