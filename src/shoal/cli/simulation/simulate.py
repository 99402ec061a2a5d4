"""`shoal simulate`: run a trace of tasks through a policy, without any device."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from shoal.cli.simulation import workload
from shoal.schedule.allocator.policy import policies
from shoal.schedule.formats.tables import check_trace, read_trace, write_trace
from shoal.schedule.formats.views import read_records
from shoal.schedule.model.entities import Pool, Trace
from shoal.schedule.model.throughputs import Throughputs
from shoal.schedule.simulate.bounds import Bounds, bounds
from shoal.schedule.simulate.metrics import Figures, figures
from shoal.schedule.simulate.plots import page
from shoal.schedule.simulate.replay import day, replay
from shoal.schedule.simulate.simulator import Result, Simulation, StuckError
from shoal.schedule.simulate.synthetic import generate

#: Rounds kept for the plots of larger runs would fill the memory.
SPANS_TASKS_MAX = 5000
GENERATED_MAX = 10_000_000


@click.command()
@click.argument("trace", required=False, type=click.Path(exists=True, dir_okay=False))
@click.option("--policy", "names", multiple=True, default=["shoal"], show_default=True,
              help="Policy to run; repeat for several. `list` lists them.")  # fmt: skip
@workload.options
@click.option("--generate", "count", type=int, metavar="TASKS",
              help="Make a trace instead of reading one.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Seed of --generate.")
@click.option(
    "--per-hour", default=0.0, help="Arrivals per hour of --generate; 0: all at the start."
)
@click.option(
    "--save-trace", type=click.Path(dir_okay=False), help="File for the trace that is run."
)
@click.option("--record", "record", type=click.Path(exists=True, dir_okay=False), metavar="FILE",
              help="Run the recorded rounds of a planner again.")  # fmt: skip
@click.option("--no-bounds", is_flag=True, help="Skip the lower bounds.")
@click.option(
    "--html", "html_path", type=click.Path(dir_okay=False), help="File for plots, one page."
)
@click.option("--json", "as_json", is_flag=True, help="Print figures as JSON.")
def simulate(
    trace: str | None,
    throughputs: str | None,
    devices: str | None,
    names: tuple[str, ...],
    round_s: float,
    restart_cost_s: float,
    balance: float,
    together_max: int,
    quotas: tuple[str, ...],
    count: int | None,
    seed: int,
    per_hour: float,
    save_trace: str | None,
    record: str | None,
    no_bounds: bool,
    html_path: str | None,
    as_json: bool,
) -> None:
    """Simulate TRACE on a pool and print what a policy makes of it.

    TRACE and the table are in Shoal's CSV formats or in Gavel's; Shoal recognizes each.

    \b
    shoal simulate examples/schedule/trace.csv \\
        --throughputs examples/schedule/throughputs.csv --devices a100:2:40GiB,t4:4:16GiB
    """
    if "list" in names:
        for name, known_policy in sorted(policies().items()):
            click.echo(f"{name:16} {known_policy.summary}")
        return
    chosen = [workload.policy(name, balance) for name in names]
    workload.check_numbers(round_s, restart_cost_s, together_max, balance)
    with workload.bad_input():
        if record is not None:
            table, pool, tasks = _recorded(Path(record), trace, count)
        else:
            table, pool = workload.load(throughputs, devices, quotas)
            tasks = _tasks(trace, table, pool, count, seed, per_hour)
        check_trace(tasks, table, pool)
    if save_trace is not None:
        write_trace(Path(save_trace), tasks.tasks)
    console = Console(stderr=True)
    known = None
    if not no_bounds:
        with console.status("computing lower bounds"):
            known = bounds(pool, table, tasks.tasks, together_max)
    runs = []
    for policy in chosen:
        simulation = Simulation(
            pool, table, tasks.tasks, policy, round_s, restart_cost_s, together_max,
            keep_spans=html_path is not None and len(tasks.tasks) <= SPANS_TASKS_MAX,
        )  # fmt: skip
        result = _run(simulation, console, quiet=as_json)
        runs.append((figures(result, policy.name, round_s, restart_cost_s, known), result))
    if html_path is not None:
        Path(html_path).write_text(page(runs, f"{Path(tasks.file).name} on {devices}"))
    if as_json:
        found = [f for f, _ in runs]
        click.echo(msgspec.json.encode(found[0] if len(found) == 1 else found).decode())
    else:
        _print([f for f, _ in runs], known, html_path)


def _recorded(path: Path, trace: str | None, count: int | None) -> tuple[Throughputs, Pool, Trace]:
    """Ask a recorded day's questions again, and return the day as a workload."""
    if trace is not None or count is not None:
        raise click.UsageError("--record is a trace of its own; leave TRACE and --generate out")
    records = list(read_records(path))
    pool, table, tasks = day(records)
    found = replay(records)
    click.echo(
        f"{found.rounds} rounds; the planner decided {found.by_planner}, and decides "
        f"{found.equal} of them alike now",
        err=True,
    )
    return table, pool, Trace(tasks, str(path), list(range(1, len(tasks) + 1)))


def _tasks(
    trace: str | None, table: Throughputs, pool: Pool, count: int | None, seed: int, per_hour: float
) -> Trace:
    if count is not None:
        if not 1 <= count <= GENERATED_MAX or not 0 <= per_hour < float("inf"):
            raise ValueError(f"--generate must be 1 to {GENERATED_MAX}, --per-hour 0 or more")
        made = generate(table, pool, count, seed, per_hour)
        return Trace(made, f"seed {seed}", list(range(1, count + 1)))
    if trace is None:
        raise click.UsageError("give a TRACE, or --generate TASKS")
    return read_trace(Path(trace))


def _run(simulation: Simulation, console: Console, quiet: bool) -> Result:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=quiet, transient=True) as bar:
        line = bar.add_task(simulation.policy.name, total=len(simulation.tasks))
        try:
            return simulation.run(lambda done, _: bar.update(line, completed=done))
        except StuckError as error:
            raise click.ClickException(str(error)) from None


def _print(found: list[Figures], known: Bounds | None, html_path: str | None) -> None:
    first = found[0]
    table = Table(
        title=f"{first.tasks} tasks on {first.devices} devices, rounds of {first.round_s:g} s, "
        f"restart cost {first.restart_cost_s:g} s"
    )
    table.add_column("policy")
    heads = "average h", "p99 h", "makespan h", "use", "worst ratio", "restarts", "solve ms", "gap"
    for head in heads:
        table.add_column(head, justify="right")
    for f in found:
        table.add_row(
            f.policy,
            _with_gap(f.average_completion_s, f.gaps, "average_completion"),
            f"{f.p99_completion_s / 3600:.2f}",
            _with_gap(f.makespan_s, f.gaps, "makespan"),
            f"{f.utilisation:.0%}",
            f"{f.worst_finish_ratio:.2f}",
            str(f.restarts),
            f"{f.solve_mean_s * 1e3:.0f} (max {f.solve_max_s * 1e3:.0f})",
            "" if f.decision_gap_mean is None else f"{f.decision_gap_mean:.2%}",
        )
    if known is not None:
        average, makespan = known.average_completion_s, known.makespan_s
        table.add_section()
        table.add_row("lower bound", f"{average / 3600:.2f}", "", f"{makespan / 3600:.2f}")
    Console().print(table)
    if html_path is not None:
        click.echo(f"plots: {html_path}")


def _with_gap(seconds: float, gaps: dict[str, float] | None, name: str) -> str:
    above = "" if gaps is None else f" (+{gaps[name]:.0%})"
    return f"{seconds / 3600:.2f}{above}"
