"""Figures of the scheduler: every number about it in docs/figures.md comes from here.

    python -m bench.schedule gavel --data FOLDER   # Gavel's traces, all policies, both restart costs
    python -m bench.schedule limits --data FOLDER  # what no schedule of Gavel's traces can reach
    python -m bench.schedule makespans --data FOLDER   # the same for the last finish
    python -m bench.schedule seeds [--data FOLDER] # synthetic traces that nothing was tuned on
    python -m bench.schedule scale                 # decisions and a simulated week
    python -m bench.schedule predict               # error of predicted speeds

    python -m bench.pages                          # the tables of docs/figures.md

FOLDER holds `physical_cluster_throughputs.json` and `traces/` of Gavel (OSDI 2020). Results are
printed, and written to bench/results/schedule-*.json.
"""

from __future__ import annotations

import resource
import statistics
import time
from pathlib import Path

import click
import numpy as np

from bench.schedule.gavel_fifo import GavelFifo
from bench.schedule.predict import predict
from bench.schedule.results import print_row, save
from shoal.schedule.allocator.policy import Policy, TaskState, View, policies
from shoal.schedule.formats.tables import read_table, read_trace
from shoal.schedule.model.entities import Kind, Pool, Task
from shoal.schedule.model.throughputs import Throughputs
from shoal.schedule.policies.shoal import Shoal
from shoal.schedule.simulate.bounds import bounds, completion_bound, makespan_bound
from shoal.schedule.simulate.metrics import figures
from shoal.schedule.simulate.simulator import Simulation
from shoal.schedule.simulate.synthetic import generate

GAVEL_POOL = "v100:8,p100:16,k80:24"
TRACES = ("max_min_fairness", "minimize_makespan")
gavels_data = click.option("--data", required=True, type=click.Path(exists=True, path_type=Path))


class Rows(list[dict[str, object]]):
    """The results of a command. Each is printed as it comes."""

    def add(self, row: dict[str, object]) -> None:
        self.append(row)
        print_row(row)


class Gavel:
    """Gavel's pool, measured speeds and traces."""

    def __init__(self, data: Path) -> None:
        self.table = read_table(data / "physical_cluster_throughputs.json")
        self.pool = Pool.parse(GAVEL_POOL)
        self._traces = data / "traces"

    def tasks(self, trace: str) -> list[Task]:
        return read_trace(self._traces / f"{trace}.trace").tasks


def _row(
    name: str, pool: Pool, table: Throughputs, tasks: list[Task], policy: Policy, cost_s: float
) -> dict[str, object]:
    result = Simulation(pool, table, tasks, policy, 360.0, cost_s).run()
    f = figures(result, name, 360.0, cost_s, None)
    return {
        "policy": name,
        "restart_cost_s": cost_s,
        "average_h": round(f.average_completion_s / 3600, 3),
        "p99_h": round(f.p99_completion_s / 3600, 2),
        "makespan_h": round(f.makespan_s / 3600, 2),
        "utilisation": round(f.utilisation, 2),
        "worst_ratio": round(f.worst_finish_ratio, 2),
        "restarts": f.restarts,
        "solve_mean_ms": round(f.solve_mean_s * 1e3, 1),
        "solve_max_ms": round(f.solve_max_s * 1e3, 1),
        "decision_gap": None if f.decision_gap_mean is None else round(f.decision_gap_mean, 4),
    }


@click.group()
def main() -> None:
    """Figures of the scheduler."""


@main.command()
@gavels_data
def gavel(data: Path) -> None:
    """All policies on Gavel's two traces, without and with a restart cost."""
    world, rows = Gavel(data), Rows()
    table, pool = world.table, world.pool
    for trace in TRACES:
        tasks = world.tasks(trace)
        known = bounds(pool, table, tasks)
        rows.add(
            {
                "trace": trace,
                "policy": "bound, 2 on a device",
                "average_h": round(known.average_completion_s / 3600, 3),
                "makespan_h": round(known.makespan_s / 3600, 2),
            }
        )
        made = {name: policy for name, policy in sorted(policies().items()) if name != "shoal"}
        fifo = _row("fifo with Gavel's defect", pool, table, tasks, GavelFifo(), 0.0)
        rows.add({"trace": trace} | fifo)
        three = Simulation(pool, table, tasks, Shoal(), 360.0, together_max=3).run()
        rows.add(
            {
                "trace": trace,
                "policy": "shoal, 3 on a device (predicted from pairs)",
                "average_h": round(float(three.completions_s.mean()) / 3600, 3),
                "makespan_h": round(three.makespan_s / 3600, 2),
            }
        )
        for cost_s in (0.0, 60.0):
            for name, policy in made.items():
                rows.add({"trace": trace} | _row(name, pool, table, tasks, policy(), cost_s))
            for balance in (0.0, 0.1, 0.3, 1.0) if cost_s == 0 else (0.3,):
                name = f"shoal, balance {balance:g}"
                shoal = Shoal(balance)
                rows.add({"trace": trace} | _row(name, pool, table, tasks, shoal, cost_s))
    save("gavel", rows)


#: Aims for Gavel's traces, hours: average completion time and makespan in one run.
AIMS = {"max_min_fairness": (3.0, 16.7), "minimize_makespan": (6.05, 16.3)}


@main.command()
@gavels_data
@click.option("--intervals", default=32, show_default=True, help="More are tighter and slower.")
def limits(data: Path, intervals: int) -> None:
    """The least average completion time: of any schedule, of those that end by the aim's makespan,
    and of those that also start tasks only at the rounds of 360 s."""
    world, rows = Gavel(data), Rows()
    table, pool = world.table, world.pool
    for trace, (average_h, makespan_h) in AIMS.items():
        tasks = world.tasks(trace)
        # Three on a device are predicted from pairs: nobody measured them.
        for together, latest_h, round_s in (
            (2, None, None),
            (2, makespan_h, None),
            (2, makespan_h, 360.0),
            (3, makespan_h, 360.0),
        ):
            latest_s = None if latest_h is None else latest_h * 3600
            bound_s = completion_bound(
                pool, table, tasks, together, latest_s, round_s, intervals if together == 2 else 16
            )
            assert bound_s is not None, "the makespan's own bound is below the aim"
            rows.add(
                {
                    "trace": trace,
                    "on_a_device": together,
                    "makespan_at_most_h": latest_h,
                    "rounds_s": round_s,
                    "average_at_least_h": round(bound_s / 3600, 3),
                    "aim_h": average_h,
                }
            )
    save("limits", rows)


@main.command()
@gavels_data
def makespans(data: Path) -> None:
    """The least makespan of any schedule of Gavel's traces: one linear program each, seconds."""
    world, rows = Gavel(data), Rows()
    table, pool = world.table, world.pool
    for trace in TRACES:
        tasks = world.tasks(trace)
        for together in (2, 3):
            bound_s = makespan_bound(pool, table, tasks, together)
            rows.add(
                {
                    "trace": trace,
                    "on_a_device": together,
                    "makespan_at_least_h": round(bound_s / 3600, 3),
                }
            )
    save("makespans", rows)


def own_table(seed: int, kinds: int = 4, types: int = 20) -> Throughputs:
    """A made-up table: speeds, memory and contention drawn from a seed."""
    draw = np.random.default_rng(seed)
    rows = [(f"type{n}", int(draw.choice([1, 1, 1, 2, 4]))) for n in range(types)]
    grade = np.sort(draw.lognormal(0, 0.7, kinds))[::-1]
    alone = np.outer(draw.lognormal(0, 1.5, types), grade) * draw.lognormal(0, 0.35, (types, kinds))
    memory = np.repeat(draw.uniform(1, 14, (types, 1)) * 2**30, kinds, axis=1)
    busy = draw.uniform(0.25, 1.0, (types, kinds, 2))
    return Throughputs(tuple(f"k{n}" for n in range(kinds)), rows, alone, memory, busy)


@main.command()
@click.option("--data", type=click.Path(exists=True, path_type=Path))
@click.option("--seeds", default=4)
def seeds(data: Path | None, seeds: int) -> None:
    """Synthetic traces: the policy against baselines, as ratios to the best baseline."""
    rows = Rows()
    for seed in range(seeds):
        worlds: list[tuple[str, Pool, Throughputs]] = [
            (
                "own table",
                Pool(tuple(Kind(f"k{n}", 6 + 4 * n, 16 * 2**30) for n in range(4))),
                own_table(seed),
            )
        ]
        if data is not None:
            table = read_table(data / "physical_cluster_throughputs.json")
            worlds.append(("Gavel's table", Pool.parse("v100:12,p100:12,k80:12"), table))
        for world, pool, table in worlds:
            for per_hour in (0.0, 8.0):
                tasks = generate(table, pool, 60, 100 + seed, per_hour, (0.1, 8.0))
                names = (
                    "las",
                    "max-min",
                    "max-min-packed",
                    "finish-time",
                    "makespan-packed",
                    "allox",
                )
                found = {
                    name: _row(name, pool, table, tasks, policies()[name](), 0.0) for name in names
                }
                mine = _row("shoal", pool, table, tasks, Shoal(), 0.0)
                row = {"world": world, "seed": seed, "per_hour": per_hour}
                for figure in ("average_h", "p99_h", "makespan_h", "worst_ratio"):
                    best = min(found.values(), key=lambda r: float(str(r[figure])))
                    row[figure] = mine[figure]
                    row[f"{figure}_best"] = best[figure]
                    row[f"{figure}_by"] = best["policy"]
                rows.add(row)
    for figure in ("average_h", "p99_h", "makespan_h", "worst_ratio"):
        ratios = [float(str(r[figure])) / float(str(r[f"{figure}_best"])) for r in rows]
        print(
            f"{figure}: shoal / best baseline of that figure: median {statistics.median(ratios):.2f}, "
            f"worst {max(ratios):.2f}, best {min(ratios):.2f}"
        )
    save("seeds", rows)


def _many(tasks: int, kinds: int, devices: int, seed: int) -> View:
    table = own_table(seed, kinds, 60)
    pool = Pool(tuple(Kind(f"k{n}", devices, 16 * 2**30) for n in range(kinds)))
    made = generate(table, pool, tasks, seed)
    states = [TaskState(n, t, table.row_of[t.type, t.devices], t.steps) for n, t in enumerate(made)]
    return View(0.0, 360.0, 60.0, pool, table, states)


@main.command()
@click.option("--week/--no-week", default=True)
def scale(week: bool) -> None:
    """Time of one decision, and a week of arrivals on 500 nodes with 8 devices each."""
    rows = Rows()
    for tasks, devices in ((100, 20), (1000, 20), (1000, 100), (10_000, 100)):
        spent, worked, gaps = [], [], []
        for seed in range(5):
            view = _many(tasks, 10, devices, seed)
            # A decision runs on one thread: on a busy machine its CPU time is the fairer figure.
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            plan = Shoal().decide(view)
            spent.append(time.perf_counter() - start_s)
            worked.append(time.process_time() - start_cpu_s)
            gaps.append(plan.gap or 0.0)
        rows.add(
            {
                "waiting": tasks,
                "kinds": 10,
                "devices": 10 * devices,
                "median_s": round(statistics.median(spent), 3),
                "max_s": round(max(spent), 3),
                "cpu_median_s": round(statistics.median(worked), 3),
                "cpu_max_s": round(max(worked), 3),
                "gap_max": round(max(gaps), 4),
            }
        )
    if week:
        rows.add(_week())
    save("scale", rows)


def _week() -> dict[str, object]:
    table = own_table(7, 4, 40)
    counts = (500, 1000, 1000, 1500)  # 500 nodes of 8.
    pool = Pool(tuple(Kind(f"k{n}", c, 16 * 2**30, 8) for n, c in enumerate(counts)))
    tasks = generate(table, pool, 60 * 24 * 7 * 4, 7, 240.0, (0.25, 24.0))
    run = Simulation(pool, table, tasks, Shoal(), 360.0, 60.0)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    result = run.run()
    solves = sorted(r.solve_s for r in result.rounds)
    return {
        "week": True,
        "devices": pool.devices,
        "tasks": len(tasks),
        "rounds": len(result.rounds),
        "average_h": round(float(result.completions_s.mean()) / 3600, 2),
        "utilisation": round(result.utilisation, 2),
        "waiting_max": max(r.waiting for r in result.rounds),
        "wall_s": round(time.perf_counter() - start_s, 1),
        "cpu_s": round(time.process_time() - start_cpu_s, 1),
        "solve_median_s": round(solves[len(solves) // 2], 3),
        "solve_p99_s": round(solves[int(len(solves) * 0.99)], 3),
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


main.add_command(predict)


if __name__ == "__main__":
    main()
