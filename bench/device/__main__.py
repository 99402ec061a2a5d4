"""The device's speed, in one run: `python -m bench.device`.

One compute thread on each side. Bursts of both sides alternate; every figure is the median of the
ratios of neighbouring bursts.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.status import Status

import shoal
from bench import report
from bench.device import decoding, operators, training, transfers
from bench.figures import RESULTS, Figure, Machine, Missing, Run, load, processor_name
from bench.measure import Plan
from bench.peers import compare as peers

GROUPS = ("training", "operators", "transfers", "decoding", "peers")
LOAD_LIMIT = 0.5
QUICK = Plan(rounds=5, burst_s=0.06)


def measure(
    groups: tuple[str, ...], plan: Plan, quick: bool, pythons: dict[str, str], status: Status
) -> tuple[list[Figure], list[Missing], dict[str, bool]]:
    """All figures of the groups, in their order."""
    figures: list[Figure] = []
    missing: list[Missing] = []
    checks: dict[str, bool] = {}

    def tell(text: str) -> None:
        status.update(text)

    if "training" in groups:
        found, checked = training.measure(plan, tell)
        figures += found
        checks |= checked
    if "operators" in groups:
        figures += operators.measure(plan, tell)
    if "transfers" in groups:
        sizes = transfers.QUICK_SIZES if quick else transfers.SIZES
        found, checked = transfers.measure(plan, sizes, tell)
        figures += found
        checks |= checked
    if "decoding" in groups:
        found, checked = decoding.measure(plan, tell)
        figures += found
        checks |= checked
    if "peers" in groups:
        found, absent = peers.measure(plan, pythons, tell)
        figures += found
        missing += absent
    return figures, missing, checks


def parse_pythons(given: tuple[str, ...]) -> dict[str, str]:
    pythons = {}
    for text in given:
        name, separator, path = text.partition("=")
        if name not in peers.PEERS or not separator:
            names = ", ".join(peers.PEERS)
            raise click.BadParameter(f"{text!r} is not NAME=PYTHON with a NAME of: {names}")
        pythons[name] = path
    return pythons


@click.command()
@click.option("--quick", is_flag=True, help="Fewer and shorter bursts, no large transfers.")
@click.option("--rounds", type=click.IntRange(2), help="Bursts of each side, per figure.")
@click.option("--only", multiple=True, type=click.Choice(GROUPS), help="A group; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON, and only them.")
@click.option(
    "--peer-python", multiple=True, metavar="NAME=PYTHON", help="The interpreter that has a peer."
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=RESULTS,
    help="Folder for device.json and device.html.",
)
def main(
    quick: bool,
    rounds: int | None,
    only: tuple[str, ...],
    as_json: bool,
    peer_python: tuple[str, ...],
    output: Path,
) -> None:
    """Measures the device against local torch, memcpy and peers."""
    plan = QUICK if quick else Plan()
    plan = Plan(rounds or plan.rounds, plan.burst_s)
    pythons = parse_pythons(peer_python)
    console = Console(stderr=as_json)
    before = load()
    console.print(f"load average at start: {before:.2f}")
    if before > LOAD_LIMIT:
        console.print(
            f"[yellow]Other programs are running (load above {LOAD_LIMIT}). Client and device "
            "need a core each, and two processes get more of a busy machine than one: these "
            "figures say little. Run again when the machine is quiet.[/yellow]"
        )
    torch.set_num_threads(1)
    with (
        shoal.up(devices=["cpu,threads=1"]) as pool,
        shoal.connect(pool.url),
        console.status("…") as status,
    ):
        figures, missing, checks = measure(only or GROUPS, plan, quick, pythons, status)
    machine = Machine(
        processor=processor_name(),
        cores=torch.multiprocessing.cpu_count(),
        torch=str(torch.__version__),
        python=platform.python_version(),
        load_before=before,
        load_after=load(),
        rounds=plan.rounds,
        quick=quick,
    )
    run = Run(machine, figures, missing, checks)
    partial = bool(only)
    path = output / ("device-partial.json" if partial else "device.json")
    run.save(path)
    report.write_html(run, path.with_suffix(".html"))
    if as_json:
        print(json.dumps(json.loads(path.read_text()), indent=1))
    else:
        report.print_tables(run, console)
        console.print(f"written: {path} and {path.with_suffix('.html')}")
    if not all(checks.values()):
        sys.exit("a check failed: see above")


if __name__ == "__main__":
    main()
