"""`shoal why`: why a request waits, what would help, and when it will run; live, or in a simulation."""

from __future__ import annotations

import math
from pathlib import Path

import click
from rich.console import Console

from shoal.cli import why_live
from shoal.cli.common import json_option, pool_option, pool_url, print_json
from shoal.cli.simulation import why_simulated, workload
from shoal.schedule.formats.tables import check_trace, read_trace
from shoal.schedule.policies.shoal import Shoal
from shoal.schedule.simulate.simulator import Simulation

NEVER = 3  # exit code: as things are, it never runs


@click.command()
@click.argument("task")
@click.option(
    "--if",
    "what_if",
    multiple=True,
    metavar="NAME=VALUE",
    help="Answer as if it asked for this: memory=8GiB, devices=1, kind=a100, limit=10m.",
)
@pool_option
@click.option("--trace", type=click.Path(exists=True, dir_okay=False),
              help="Trace of a simulation whose task to explain, as for `shoal simulate`.")  # fmt: skip
@click.option("--at", "at_s", type=float, metavar="SECONDS",
              help="Moment to explain. Default: when the task arrives.")  # fmt: skip
@click.option("--policy", "name", default=Shoal.name, show_default=True,
              help="Policy of the simulation; `shoal simulate --policy list` lists them.")  # fmt: skip
@click.option(
    "--follow", is_flag=True, help="Simulate on until the task ends, and print when it ran."
)
@workload.options
@json_option
@click.pass_context
def why(
    context: click.Context,
    task: str,
    what_if: tuple[str, ...],
    pool: str | None,
    trace: str | None,
    at_s: float | None,
    name: str,
    follow: bool,
    throughputs: str | None,
    devices: str | None,
    round_s: float,
    restart_cost_s: float,
    balance: float,
    together_max: int,
    quotas: tuple[str, ...],
    as_json: bool,
) -> None:
    """Explain why TASK waits: all reasons, what would let it run, and when it will.

    TASK is a task, or a request for a lease that waits. With --trace it is a task of a simulation; in
    a trace of Gavel's, its line number will do. Exit code 3 if it can never run.

    \b
    shoal why big-7f3 --if memory=8GiB
    shoal why sweep-4 --trace examples/schedule/trace.csv --at 3600 \\
        --throughputs examples/schedule/throughputs.csv --devices a100:2:40GiB,t4:4:16GiB
    """
    if trace is None:
        if not why_live.show(pool_url(pool), task, what_if, as_json):
            context.exit(NEVER)
        return
    policy = workload.policy(name, balance)
    workload.check_numbers(round_s, restart_cost_s, together_max, balance)
    if at_s is not None and not 0 <= at_s < math.inf:
        raise workload.BadInput(f"--at {at_s} must be seconds since the trace began, from 0 on")
    with workload.bad_input():
        table, devices_of = workload.load(throughputs, devices, quotas)
        tasks = read_trace(Path(trace))
        wanted = why_simulated.find(tasks, task)
        check_trace(tasks, table, devices_of, may_never_run=True)
    run = Simulation(devices_of, table, tasks.tasks, policy, round_s, restart_cost_s, together_max)
    number = next(i for i, t in enumerate(run.tasks) if t.name == wanted)
    with Console(stderr=True).status(f"simulating until {wanted} is explained"):
        report = why_simulated.investigate(run, number, at_s, follow)
    if as_json:
        print_json(report)
    else:
        why_simulated.show(report)
    if report.state == "never runs":
        context.exit(NEVER)
