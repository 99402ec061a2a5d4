"""Two groups on devices of two hosts, beside DDP between the same two: `python -m bench.train.hosts`.

Hosts are network namespaces of this machine, whose cables carry a limited rate; the program is at a
third. Gradients go from worker to worker through TLS 1.3, DDP's (Gloo) as they are. All share two
cores, with what it takes to encrypt: what is to be seen is whether devices wait for their cables.

    python -m bench.train.hosts [--quick] [--model GPT] [--output bench/results/train-hosts.json]
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from tests.support.cluster import Cluster
from tests.support.namespaces import Host, Hosts

import shoal
from bench.train.peers import MODELS, made, serve
from bench.train.race import CEILING, Contestant, Programs, ours, peers, race, show, summary

RATES = ("1gbit", "10gbit")
MEMORY = "3GiB"


def at_desk(cluster: Cluster, model: str) -> Programs:
    """The program that trains on both hosts' devices."""
    words = [sys.executable, "-m", "bench.train.hosts", "--inside", model]
    variables = ("HOME", "SHOAL_STATE", "SHOAL_IDENTITY")
    here = ["env", *(f"{name}={cluster.desk.environment[name]}" for name in variables)]
    return Programs("two groups", [cluster.desk.host.command(*here, *words)])


def inside(model: str) -> None:
    torch.set_num_threads(1)
    _, batch = made(model)
    with shoal.connect(devices=2, memory=MEMORY) as lease, ours(model, 2, 1, batch) as run:
        assert all(lease.by_network)
        run(1)
        serve(run)


def compare(
    model: str, hosts: list[Host], rounds: int, burst_s: float
) -> tuple[dict[str, list[float]], float]:
    devices = hosts[:2]
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = Cluster(hosts, directory, memory=MEMORY)
        stack.callback(cluster.close)
        cluster.desk.shoal(*cluster.join_line.split()[1:])
        made_of = {
            "one process": peers("one process", model, [1.0]),
            CEILING: peers(CEILING, model, [1.0, 1.0]),
            "DDP": peers("DDP", model, [1.0, 1.0], devices),
            "two groups": at_desk(cluster, model),
        }
        for programs in made_of.values():
            stack.callback(programs.close)
        contestants = [Contestant(name, p.run, p.pids) for name, p in made_of.items()]
        return race(contestants, rounds, burst_s)


@click.command()
@click.option("--quick", is_flag=True, help="Fewer and shorter bursts.")
@click.option("--model", multiple=True, type=click.Choice(list(MODELS)))
@click.option("--rate", multiple=True, type=click.Choice(RATES), help="Of the hosts' cables.")
@click.option("--inside", "desk", hidden=True, help="The program at the desk.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False))
def main(
    quick: bool,
    model: tuple[str, ...],
    rate: tuple[str, ...],
    desk: str | None,
    output: Path | None,
) -> None:
    """Prints the speed of two groups on two hosts, and DDP's, against one process."""
    if desk is not None:
        return inside(desk)
    torch.set_num_threads(1)
    console = Console()
    rounds, burst_s = (3, 1.0) if quick else (6, 2.0)
    tables: dict[str, Any] = {}
    stolen = 0.0
    with Hosts(3) as hosts:
        for chosen in model or MODELS:
            for cable in rate or RATES:
                for host in hosts:
                    host.limit(cable)
                times, most_stolen = compare(chosen, hosts, rounds, burst_s)
                stolen = max(stolen, most_stolen)
                tables[f"{chosen}, {cable}"] = found = summary(times)
                show(console, f"{chosen}, cables of {cable}", found)
                console.print(f"at most {most_stolen:.1%} of a burst was stolen")
    if output is not None:
        results = {"rounds": rounds, "most_stolen": stolen, "tables": tables}
        output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
