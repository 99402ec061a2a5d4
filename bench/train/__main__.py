"""Training over two devices beside PyTorch's own ways, and beside two processes that share nothing.

All programs stay resident and run in short bursts, one after another, round by round and in every
second round in the other direction; a figure is the median over the rounds of samples a second against
one process in the same round. So what else the machine does hits all alike. A burst in which the
host took processor time away from this machine (its "steal" time) is run again, whoever's it is.

    python -m bench.train [--quick] [--model GPT] [--realtime] [--output bench/results/train.json]
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from bench.train.peers import MODELS
from bench.train.race import SLOW, compare, show, summary

#: Least ratios that the project aims at, of the ceiling or of one device.
AIMS = {
    "data parallel": "0.95 of the ceiling",
    "two stages": "GPT 1.71, CNN 1.55, MLP 1.31",
    "unequal, data parallel": f"0.95 x {1 + SLOW:.2f}, or 0.95 of the ceiling where that is less",
    "unequal, two stages": "GPT 1.25, CNN 1.10",
}


@click.command()
@click.option("--quick", is_flag=True, help="Fewer and shorter rounds.")
@click.option("--rounds", "count", type=click.IntRange(2), default=10, show_default=True)
@click.option("--model", type=click.Choice(list(MODELS)), multiple=True, help="Default: all.")
@click.option("--equal/--unequal", "only", default=None, help="Only equal or unequal devices.")
@click.option("--realtime", "urgent", is_flag=True, help="For a busy machine: go before all else.")
@click.option("--output", type=click.Path(path_type=Path), help="A file for the results, as JSON.")
def main(
    quick: bool,
    count: int,
    model: tuple[str, ...],
    only: bool | None,
    urgent: bool,
    output: Path | None,
) -> None:
    """Prints the speed of two devices against one process, ours and the peers'."""
    torch.set_num_threads(1)
    console = Console()
    rounds, burst_s = (4, 1.0) if quick else (count, 2.5)
    for name, aim in AIMS.items():
        console.print(f"aim, {name}: {aim}")
    load = os.getloadavg()[0]
    console.print(f"{os.cpu_count()} cores, load {load:.1f}, {rounds} rounds of {burst_s} s")
    tables = {}
    stolen = 0.0
    for chosen in model or MODELS:
        for equal, speeds in ((True, [1.0, 1.0]), (False, [1.0, SLOW])):
            if only is None or only == equal:
                kind = "equal devices" if equal else f"devices of speed 1 and {SLOW}"
                times, most_stolen = compare(chosen, speeds, rounds, burst_s, urgent)
                found = summary(times)
                show(console, f"{chosen}, {kind}", found)
                console.print(f"at most {most_stolen:.1%} of a burst was stolen")
                stolen = max(stolen, most_stolen)
                tables[f"{chosen}, {'equal' if equal else 'unequal'}"] = found
    if output is not None:
        results: dict[str, Any] = {"cores": os.cpu_count(), "load": load, "rounds": rounds}
        results |= {"most_stolen": stolen, "tables": tables}
        output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
