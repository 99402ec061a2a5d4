"""A trace as real training programs in a real pool, beside the simulator's prediction.

    python -m bench.live FOLDER [--jobs 24] [--minutes 15] [--ratio 1.10]

FOLDER has a trace and a throughput table in Gavel's formats: traces/max_min_fairness.trace and
simulation_throughputs.json. The first one-device jobs of the trace become training programs on four
`threads=1` devices of unequal speeds and memories. Their lengths relative to each other are those of
the trace on a v100; work and arrivals are scaled to the time given.

1. Each type of job runs alone for a few seconds: its speed, and the time from submission to step 1.
2. `shoal submit` submits every job at its arrival, to a pool with the rule `first-come`, then to one
   with `least-waiting`, whose planner decides.
3. The recorded day is simulated by the same policy, with the measured time to start. A started task
   stays on its device, as in a pool, and is suspended for nothing.

Prints average completion times and the gains of pairs that shared a device. Exit code 1: a job was
lost or ran twice, or the planner's day took more than --ratio times the prediction.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.standing import StandingPool

from shoal.schedule.allocator.placement import Placement
from shoal.schedule.formats import gavel, views
from shoal.schedule.formats.records import Record
from shoal.schedule.model.throughputs import Throughputs
from shoal.schedule.policies.shoal import Shoal
from shoal.schedule.simulate.replay import day
from shoal.schedule.simulate.simulator import Simulation

REFERENCE = "v100"
SPEEDS = {"d1": (0.4, 512), "d2": (0.3, 384), "d3": (0.2, 256), "d4": (0.1, 192)}  # and MiB
FASTEST = "d1"
LEAST_STEPS = 10
#: Part of the time given that the work takes at best, and in which the jobs arrive.
WORK, ARRIVALS = 0.6, 0.3
CALIBRATION_S = 8.0
DEADLINE_FACTOR = 4.0

#: Layers and width of a model by the first word of its job type; its batch is in the type.
MODELS = {
    "ResNet-18": (4, 256), "ResNet-50": (8, 256), "Transformer": (6, 192), "LM": (2, 512),
    "Recommendation": (2, 128), "CycleGAN": (8, 192), "A3C": (2, 64),
}  # fmt: skip

PROGRAM = """
import json, sys, time
import torch
layers, width, batch, steps, seconds = (float(a) for a in sys.argv[1:6])
layers, width, batch = int(layers), int(width), int(batch)
torch.manual_seed(0)
model = torch.nn.Sequential(
    *(m for _ in range(layers) for m in (torch.nn.Linear(width, width), torch.nn.ReLU()))
).to("shoal")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.rand(batch, width, device="shoal")
done, first = 0, None
while done < steps and (first is None or not seconds or time.time() - first < seconds):
    loss = model(data).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    done += 1
    if first is None or done % 10 == 0:
        loss.item()
    first = first or time.time()
loss.item()
print(json.dumps({"first": first, "steps": done - 1, "seconds": time.time() - first}))
"""


@dataclass(frozen=True)
class Job:
    name: str
    type: str
    arrival_s: float
    reference_s: float  # of the trace, on the reference device
    steps: int = 0

    @property
    def model(self) -> list[str]:
        layers, width = MODELS[self.type.split()[0]]
        batch = "".join(c for c in self.type.partition("batch size")[2] if c.isdigit()) or "32"
        return [str(layers), str(width), batch]

    @property
    def short_type(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.type).strip("-").replace("--", "-")


@dataclass(frozen=True)
class Measured:
    """What the jobs of a type do on the fastest device."""

    steps_per_s: dict[str, float]
    start_s: float  # from submission to the first step, median


def jobs_of(folder: Path, count: int) -> list[Job]:
    """Return the first one-device jobs of the trace."""
    text = (folder / "traces" / "max_min_fairness.trace").read_text()
    trace = gavel.read_trace("max_min_fairness.trace", text)
    path = folder / "simulation_throughputs.json"
    table = gavel.read_table(path.name, path.read_text())
    kind = table.kinds.index(REFERENCE)
    found = []
    for task in trace.tasks:
        if task.devices == 1 and len(found) < count:
            speed = float(table.alone[table.row_of[task.type, 1], kind])
            number = len(found) + 1
            found.append(Job(f"job-{number}", task.type, task.arrival_s, task.steps / speed))
    return found


def scaled(jobs: Sequence[Job], measured: Measured, minutes: float) -> list[Job]:
    """Return the jobs with steps and arrivals that fit the time."""
    capacity_s = 60 * minutes * sum(speed for speed, _ in SPEEDS.values()) / SPEEDS[FASTEST][0]
    work = WORK * capacity_s / sum(job.reference_s for job in jobs)
    last_s = max(job.arrival_s for job in jobs) or 1.0
    arrivals = min(1.0, ARRIVALS * 60 * minutes / last_s)
    print(f"work is scaled by {work:.3g}, arrivals by {arrivals:.3g}")
    return [
        replace(
            job,
            arrival_s=job.arrival_s * arrivals,
            steps=max(LEAST_STEPS, round(job.reference_s * work * measured.steps_per_s[job.type])),
        )
        for job in jobs
    ]


# --- the pool --------------------------------------------------------------------------------------


def pool(folder: Path, rule: str) -> StandingPool:
    devices = [
        f"cpu,name={name},kind={name},threads=1,speed={speed:g},memory={mib}MiB,host={mib}MiB"
        for name, (speed, mib) in SPEEDS.items()
    ]
    return StandingPool(
        folder, *devices, options=("--rule", rule), tasks=True, profile=rule == "least-waiting"
    )


def asked(pool: StandingPool, *arguments: str) -> Any:
    done = pool.run(*arguments, SHOAL_POOL=pool.url)
    if done.code != 0:
        raise SystemExit(f"shoal {' '.join(arguments)}: {done.out}{done.err}")
    return json.loads(done.out)


def submit(pool: StandingPool, job: Job, key: str, *options: str, seconds: float = 0.0) -> str:
    program = pool.directory / "train.py"
    if not program.exists():
        program.write_text(PROGRAM)
    arguments = [sys.executable, str(program), *job.model, str(job.steps), str(seconds)]
    made = asked(
        pool, "submit", "--json", "--name", job.short_type, "--key", key, *options, "--", *arguments
    )
    return str(made["id"])


def wait_all(pool: StandingPool, ids: Sequence[str], seconds: float) -> dict[str, Any]:
    """Return the tasks once they have ended, by id."""
    deadline = time.monotonic() + seconds
    while True:
        found = {t["id"]: t for t in asked(pool, "queue", "--all", "--json")}
        if all(found.get(i, {}).get("ended_at") for i in ids):
            return {i: found[i] for i in ids}
        if time.monotonic() > deadline:
            late = [i for i in ids if not found.get(i, {}).get("ended_at")]
            raise SystemExit(f"after {seconds:.0f} s these have not ended: {', '.join(late)}")
        time.sleep(1.0)


def moment(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def measure(pool: StandingPool, jobs: Sequence[Job]) -> Measured:
    """Run each type alone on the fastest device."""
    speeds, starts = {}, []
    for job in {job.type: job for job in jobs}.values():
        endless = replace(job, steps=10**9)
        options = ("--kind", FASTEST)
        task = submit(pool, endless, f"alone {job.type}".replace(" ", "_"), *options,
                       seconds=CALIBRATION_S)  # fmt: skip
        ended = wait_all(pool, [task], 600)[task]
        said = pool.run("logs", task, SHOAL_POOL=pool.url).out.strip()
        if ended["state"] != "succeeded":
            raise SystemExit(f"{job.type} alone is {ended['state']}: {ended['end_reason']}\n{said}")
        told = json.loads(said.splitlines()[-1])
        speeds[job.type] = told["steps"] / told["seconds"]
        starts.append(told["first"] - moment(ended["submitted_at"]))
        print(
            f"{job.type}: {speeds[job.type]:.1f} steps/s on {FASTEST}, starts in {starts[-1]:.1f} s"
        )
    return Measured(speeds, statistics.median(starts))


def play(
    pool: StandingPool, jobs: Sequence[Job], minutes: float
) -> tuple[float, set[str], list[str]]:
    """Submit every job at its arrival. Return the average completion time, the tasks, and what went
    wrong."""
    begun = time.monotonic()
    ids: dict[str, str] = {}

    def one(job: Job) -> None:
        time.sleep(max(0.0, begun + job.arrival_s - time.monotonic()))
        ids[job.name] = submit(pool, job, job.name, "--steps", str(job.steps))

    threads = [threading.Thread(target=one, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(ids) < len(jobs):
        return float("nan"), set(), [f"{len(jobs) - len(ids)} submissions failed"]
    ended = wait_all(pool, list(ids.values()), DEADLINE_FACTOR * 60 * minutes)
    problems = [
        f"{task['id']} is {task['state']} after {task['attempt']} attempts: {task['end_reason']}"
        for task in ended.values()
        if task["state"] != "succeeded" or task["attempt"] != 1
    ]
    times = [moment(t["ended_at"]) - moment(t["submitted_at"]) for t in ended.values()]
    return statistics.fmean(times), set(ended), problems


# --- the prediction --------------------------------------------------------------------------------


class PoolRules(Simulation):
    """The simulator with the rules of a pool: a task takes a while to start, and then stays."""

    def _move(self, after: Placement) -> set[int]:
        fresh = {task for task in after if not self.active[task].started}
        super()._move(after)
        for state in self.active.values():
            state.restart_cost_s = None if state.id in fresh else 0.0
        return fresh

    def _run_group(self, assignment: Any, devices: tuple[int, ...], resumed: set[int]) -> float:
        for task in assignment.tasks:
            state = self.active[task]
            kind = frozenset([self.pool.names[assignment.kind]])
            state.task = replace(state.task, kinds=kind)
        return super()._run_group(assignment, devices, resumed)


def predict(records: Sequence[Record], ids: set[str], start_s: float) -> float:
    """Return the average completion time of the recorded day in the simulator."""
    devices, table, recorded = day(records)
    tasks = [task for task in recorded if task.name in ids]
    if len(tasks) < len(ids):
        print(f"the record knows {len(tasks)} of {len(ids)} jobs; the prediction is of those")
    run = PoolRules(devices, table, tasks, Shoal(), max(5.0, start_s), start_s).run()
    return float(np.mean(run.completions_s))


def pairs(records: Sequence[Record]) -> list[str]:
    """Say what pairs that shared a device gained, predicted and measured."""
    _, table, _ = day(records)
    guessed = Throughputs(
        table.kinds, table.rows, table.alone, table.memory_bytes, table.busy, unknown_shares=False
    )
    lines = []
    for (kind, group), rates in sorted(table.measured.items()):
        before = guessed.rates(kind, group)
        alone = [float(table.alone[row, kind]) for row in group]
        if before is None or len(group) != 2 or min(alone) <= 0:
            continue
        gains = [sum(r / a for r, a in zip(one, alone, strict=True)) for one in (before, rates)]
        names = " + ".join(table.rows[row][0][:8] for row in group)
        where = f"pair {names} on {table.kinds[kind]}"
        lines.append(f"{where}: predicted gain {gains[0]:.2f}, measured {gains[1]:.2f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--ratio", type=float, default=1.10)
    options = parser.parse_args()
    jobs = jobs_of(options.folder, options.jobs)
    problems: list[str] = []
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="shoal-live-") as folder:
        measured: Measured | None = None
        for rule in ("first-come", "least-waiting"):
            place = Path(folder) / rule
            place.mkdir()
            with pool(place, rule) as made:
                again = measure(made, jobs)  # the planner learns the types by it
                measured = measured or again
                ready = scaled(jobs, measured, options.minutes)
                found[rule], ids, wrong = play(made, ready, options.minutes)
                problems += wrong
                print(f"{rule}: average completion {found[rule]:.1f} s")
            if rule == "least-waiting":
                [path] = place.rglob("rounds.jsonl")
                records = [r for r in views.read_records(path) if r.question.view.tasks]
                start_s = again.start_s
    predicted = predict(records, ids, start_s)
    ratio = found["least-waiting"] / predicted
    print(
        f"simulated: {predicted:.1f} s, given {start_s:.1f} s to start; live is {ratio:.2f} of it"
    )
    print(f"first-come takes {found['first-come'] / found['least-waiting']:.2f} times as long")
    print("\n".join(pairs(records) or ["no pair shared a device for long enough to be measured"]))
    by_planner = sum(record.source == "planner" for record in records)
    print(f"{by_planner} of {len(records)} rounds were the planner's")
    print("\n".join(problems) or f"{len(jobs)} jobs ended once each, in both pools")
    sys.exit(1 if problems or ratio > options.ratio else 0)


if __name__ == "__main__":
    main()
