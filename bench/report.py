"""Show a run: tables in the terminal, tables for docs/figures.md, and a page with a plot.

`python -m bench.report` prints the last run. `python -m bench.pages` writes the tables.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from bench import plot
from bench.figures import RESULTS, Figure, Run, number

TITLES = {
    "training": "A training step",
    "operators": "Small operators and reads",
    "transfers": "Transfers",
    "decoding": "Token by token",
    "peers": "Peers",
    "step": "A training step over the network",
    "bandwidth": "Bandwidth over the network",
    "delay": "A long way, one read a step",
    "narrow": "Between two hosts, limited",
}
VERDICT = {True: "met", False: "missed", None: "–"}


def duration(microseconds: float | None) -> str:
    if microseconds is None:
        return ""
    if microseconds >= 1e6:
        return f"{number(microseconds / 1e6)} s"
    if microseconds >= 1e3:
        return f"{number(microseconds / 1e3)} ms"
    return f"{number(microseconds)} µs"


def target(figure: Figure) -> str:
    if figure.target is None:
        return "–"
    return f"{'≤' if figure.better == 'lower' else '≥'} {figure.target:g}"


def ratio_range(figure: Figure) -> str:
    if figure.ratio.q1 == figure.ratio.q3:
        return ""
    return f"{number(figure.ratio.q1)} to {number(figure.ratio.q3)}"


def describe_machine(run: Run) -> str:
    machine = run.machine
    quick = "quick run (coarse), " if run.machine.quick else ""
    return (
        f"{quick}{machine.processor}, {machine.cores} cores, torch {machine.torch}, one compute "
        f"thread on each side, {machine.rounds} rounds, load average {machine.load_before:.2f} "
        f"before and {machine.load_after:.2f} after"
    )


def machine(run: Run) -> list[str]:
    """Return where and how the run took place, as a table."""
    return ["| measured on |", "|---|", f"| {describe_machine(run)} |"]


def print_tables(run: Run, console: Console) -> None:
    console.print(describe_machine(run))
    for group, figures in groupby(run.figures, key=lambda figure: figure.group):
        rows = list(figures)
        table = Table(title=f"{TITLES[group]}: {rows[0].what}", title_justify="left")
        for heading in ("", "ratio", "quartiles", "target", "", "base", "shoal", "remarks"):
            table.add_column(heading, justify="left" if heading in ("", "remarks") else "right")
        for figure in rows:
            colour = {True: "green", False: "red", None: "dim"}[figure.meets]
            table.add_row(
                figure.name,
                f"[bold]{number(figure.ratio.median)}[/bold]",
                ratio_range(figure),
                target(figure),
                f"[{colour}]{VERDICT[figure.meets]}[/{colour}]",
                duration(figure.base_us),
                duration(figure.ours_us),
                figure.note,
            )
        console.print(table)
    for peer in run.missing:
        console.print(f"{peer.name}: {peer.reason}")
    for check, passed in run.checks.items():
        console.print(f"[{'green' if passed else 'red'}]{'yes' if passed else 'NO '}[/] {check}")


def tables(run: Run) -> dict[str, list[str]]:
    """Return the tables of docs/figures.md about one device, by name."""
    made = {"device: machine": machine(run)}
    for group, figures in groupby(run.figures, key=lambda figure: figure.group):
        rows = list(figures)
        made[f"device: {group}"] = [
            f"| {rows[0].what} | ratio | quartiles | target | |",
            "|---|---:|---:|---:|---|",
            *(
                f"| {f.name} | {number(f.ratio.median)} | {ratio_range(f)} | {target(f)} "
                f"| {VERDICT[f.meets]} |"
                for f in rows
            ),
        ]
    made["device: not measured"] = ["| peer | why not |", "|---|---|"]
    made["device: not measured"] += [f"| {peer.name} | {peer.reason} |" for peer in run.missing]
    made["device: checks"] = ["| check of the same run | |", "|---|---|"]
    made["device: checks"] += [
        f"| {check} | {'holds' if passed else 'fails'} |" for check, passed in run.checks.items()
    ]
    return made


def write_html(run: Run, path: Path) -> None:
    path.write_text(plot.page(run, TITLES, describe_machine(run)))


@click.command()
@click.option("--html", is_flag=True, help="Write the page with the plot again.")
def main(html: bool) -> None:
    """Show the figures of the last whole run."""
    path = RESULTS / "device.json"
    if not path.exists():
        sys.exit("no results yet; run: make bench")
    run = Run.load(path)
    if html:
        write_html(run, path.with_suffix(".html"))
        return
    print_tables(run, Console())


if __name__ == "__main__":
    main()
