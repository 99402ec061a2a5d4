"""Parts of a training over two devices, each by itself: `python -m bench.train.parts`.

- controller: a message from the program to two groups and back, which a step needs once;
- exchange: 12 MB of gradients of two devices summed and brought back to both, beside Gloo's
  all-reduce between two processes, and beside two processes that do nothing but add and copy in
  memory that they share;
- slowdown: what the groups reach, step by step, after half of one device's core was taken away, over
  the sum of what the devices can do then; the median of several times. That sum is
  measured, too, each time. A time counts if the devices were as fast afterwards as before: else
  somebody beside us slowed the machine down.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import click
import torch
import torch.distributed
from rich.console import Console
from rich.table import Table

import shoal
import shoal.train
from bench import figures
from bench.train.peers import adamw, loss_of, made
from shoal.train.group.devices import add_from

RESULTS = figures.RESULTS / "train-parts.json"
GRADIENTS = 3 * 10**6  # float32: 12 MB
DEVICES = ["cpu,threads=1,memory=2GiB"] * 2
STEPS_WHOLE, STEPS_AFTER = 14, 12
SLOWDOWNS = 11
ALONE_S = 2.0  # of devices that train by themselves
DRIFT_MAX = 0.12  # of the machine's speed, from before a slowdown to after it
BURN = "while True: pass"
NICE_OF_HALF = "3"  # weighs 526, nice 0 weighs 1024
GLOO = """
import os, sys, time, torch, torch.distributed as dist
rank = int(sys.argv[1]); torch.set_num_threads(1)
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2]}
dist.init_process_group("gloo", rank=rank, world_size=2)
x = torch.ones(int(sys.argv[3])); times = []
for _ in range(40):
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(x)
    times.append(time.perf_counter() - start)
print(sorted(times)[20])
dist.destroy_process_group()
"""
BARE = """
import mmap, sys, time, torch
rank, size = int(sys.argv[1]), int(sys.argv[3]); torch.set_num_threads(1)
memory = mmap.mmap(int(sys.argv[2]), 8 * size + 16)
x = torch.frombuffer(memory, dtype=torch.float32, count=2 * size).view(2, size)
turns = torch.frombuffer(memory, dtype=torch.int64, offset=8 * size, count=2)
turn, half = 0, size // 2
own, other = slice(rank * half, (rank + 1) * half), slice((1 - rank) * half, (2 - rank) * half)
def meet():
    global turn
    turn += 1; turns[rank] = turn
    while turns[1 - rank] < turn: pass
times = []
for _ in range(40):
    meet()
    start = time.perf_counter()
    x[rank, own].add_(x[1 - rank, own])
    meet()
    x[rank, other].copy_(x[1 - rank, other])
    meet()
    times.append(time.perf_counter() - start)
print(sorted(times)[20])
"""


def controller_ms(groups: shoal.train.WorkerGroups) -> float:
    """The round trip to all groups, median."""
    times = []
    for _ in range(300):
        start = time.perf_counter()
        for future in [group.call(lambda _: None) for group in groups]:
            future.result()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def exchange_ms(groups: shoal.train.WorkerGroups) -> float:
    """Each device sums half of the gradients and fetches the other half, median."""
    half = GRADIENTS // 2
    ours = [torch.ones(GRADIENTS, device=group.device) for group in groups]
    times = []
    for _ in range(40):
        torch.shoal.synchronize()
        start = time.perf_counter()
        for i, other in ((0, 1), (1, 0)):
            own = ours[i][i * half : (i + 1) * half]
            add_from(own, ours[other][i * half : (i + 1) * half])
        for i, other in ((0, 1), (1, 0)):
            theirs = ours[other][other * half : (other + 1) * half]
            ours[i][other * half : (other + 1) * half].copy_(theirs, non_blocking=True)
        torch.shoal.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def two_processes_ms(program: str, place: str, files: Sequence[int] = ()) -> float:
    """The slower of two ranks of a program that prints its seconds."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), place, str(GRADIENTS)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            pass_fds=files,
        )
        for rank in range(2)
    ]
    return max(float(rank.communicate()[0]) for rank in ranks) * 1e3


def gloo_ms(port: int = 29731) -> float:
    return two_processes_ms(GLOO, str(port))


def bare_ms() -> float:
    memory = os.memfd_create("gradients", 0)
    try:
        os.ftruncate(memory, 2 * 4 * GRADIENTS + 16)
        return two_processes_ms(BARE, str(memory), (memory,))
    finally:
        os.close(memory)


@contextmanager
def half_taken() -> Iterator[None]:
    """Somebody else computes on the second device's core and gets half of it."""
    burner = subprocess.Popen([sys.executable, "-c", BURN], start_new_session=True)
    try:
        os.sched_setaffinity(burner.pid, {1})
        # Where Linux divides cores between sessions, the workers' weight is divided between two
        # cores: the burner, alone in its session, must weigh as little.
        weight = Path(f"/proc/{burner.pid}/autogroup")
        if weight.exists():
            weight.write_text(NICE_OF_HALF)
        yield
    finally:
        burner.kill()
        burner.wait()


def steps_s(trainer: shoal.train.Trainer, batch: object, count: int) -> list[float]:
    """Seconds from loss to loss: nobody waits for the devices between steps."""
    seen = [time.perf_counter()]
    for _ in range(count):
        trainer.step(batch)
        seen.append(time.perf_counter())
    return [after - before for before, after in pairwise(seen)]


def settled_s(trainer: shoal.train.Trainer, batch: object) -> float:
    """Seconds of a step, once the devices have found their shares."""
    return statistics.median(steps_s(trainer, batch, STEPS_WHOLE)[STEPS_WHOLE // 2 :])


def alone_per_s(trainers: Sequence[shoal.train.Trainer], batch: object) -> float:
    """Steps a second of devices that train by themselves at the same time, summed."""
    end = time.perf_counter() + ALONE_S

    def rate(trainer: shoal.train.Trainer) -> float:
        count, start = 0, time.perf_counter()
        while time.perf_counter() < end:
            trainer.step(batch)
            count += 1
        trainer.synchronize()
        return count / (time.perf_counter() - start)

    with ThreadPoolExecutor(len(trainers)) as threads:
        return sum(threads.map(rate, trainers))


def new_sum(name: str) -> float:
    """What both devices can do, each by itself, when half of one's core is taken away, over what they
    could before."""
    with ExitStack() as stack:
        trainers = []
        for device in range(2):
            model, batch = made(name)
            half = tuple(t[: len(t) // 2] for t in batch)
            groups = stack.enter_context(shoal.train.worker_groups([[device]]))
            trainers.append(
                stack.enter_context(shoal.train.Trainer(model, loss_of, adamw(model), groups))
            )
            trainers[-1].step(half)
        before = alone_per_s(trainers, half)
        with half_taken():
            return alone_per_s(trainers, half) / before


def slowdown(name: str) -> tuple[list[float], float, float]:
    """Speed after one device has lost half its core, over the new sum, by step; how much the whole
    machine's speed changed meanwhile; and the new sum over the old one."""
    left = new_sum(name)
    model, batch = made(name)
    with shoal.train.worker_groups(2) as groups:
        with shoal.train.Trainer(model, loss_of, adamw(model), groups) as trainer:
            before = settled_s(trainer, batch)
            with half_taken():
                during = steps_s(trainer, batch, STEPS_AFTER)
            again = settled_s(trainer, batch)
    best = (before + again) / 2 / left
    return [best / seconds for seconds in during], abs(again / before - 1), left


def slowdowns(worker_pids: list[int], name: str) -> dict[str, object]:
    """By step, the median of several times; and the times that do not count, because the machine as a
    whole had become faster or slower."""
    for core, pid in enumerate(worker_pids):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), {core})
    counted: list[list[float]] = []
    lefts: list[float] = []
    left_out = 0
    while len(counted) < SLOWDOWNS and left_out < 4 * SLOWDOWNS:
        speeds, drift, left = slowdown(name)
        if drift < DRIFT_MAX:
            counted.append(speeds)
            lefts.append(left)
        else:
            left_out += 1
    return {
        "after_slowdown": [statistics.median(step) for step in zip(*counted, strict=True)],
        "new_sum": statistics.median(lefts),
        "slowdowns_left_out": left_out,
    }


@click.command()
@click.option("--model", default="CNN", show_default=True, help="Of the slowdown.")
def main(model: str) -> None:
    """Measures what a step is made of."""
    torch.set_num_threads(1)
    with shoal.up(DEVICES) as pool, shoal.connect(pool.url, devices=2) as lease:
        with shoal.train.worker_groups(2) as groups:
            results: dict[str, object] = {
                "controller_ms": controller_ms(groups),
                "exchange_ms": exchange_ms(groups),
            }
        results["gloo_ms"] = gloo_ms()
        results["bare_ms"] = bare_ms()
        results |= slowdowns(list(lease.worker_pids), model)
    table = Table("part", "measured")
    for name, value in results.items():
        shown = [round(v, 2) for v in value] if isinstance(value, list) else value
        table.add_row(name, f"{shown:.3f}" if isinstance(shown, float) else str(shown))
    Console().print(table)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
