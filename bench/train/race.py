"""Programs that train the same model, run in turns: the race of `bench.train` and its tables."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.support.namespaces import Host

import shoal
import shoal.train
from bench.train.peers import adamw, loss_of, made

SLOW = 0.45
START_TIMEOUT_S = 120.0
TRIES = 4  # of a burst
STOLEN_MAX = 0.01  # of the cores' time in a burst that counts as undisturbed
CEILING = "two independent processes"
IN_STEP = "two processes in step"  # the same, but they wait for each other after every step
#: Peers keep freed memory, as a device's allocator does: first touches cost more than copies.
PEER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}


@dataclass
class Contestant:
    """Something that runs steps: peers in processes, or ours in this one."""

    name: str
    run: Callable[[int], float]  # steps -> seconds
    pids: Sequence[int]


class Programs:
    """Programs that run steps when told to and wait otherwise. Of those that are `apart` and have
    these speeds, what counts is their sum."""

    def __init__(
        self, name: str, commands: Sequence[Sequence[str]], apart: Sequence[float] = ()
    ) -> None:
        self._apart = apart
        self._programs = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, **PEER_ENVIRONMENT},
            )
            for command in commands
        ]
        for program in self._programs:
            begun, _, _ = select.select([program.stdout], [], [], START_TIMEOUT_S)
            if not begun or self._line(program) != "ready":
                self.close()
                raise RuntimeError(f"{name} did not start")

    @property
    def pids(self) -> list[int]:
        return [program.pid for program in self._programs]

    def run(self, steps: int) -> float:
        """Seconds that the steps took all of them; of those that are apart, what they would take if
        each had as many samples as makes them end together."""
        start = time.perf_counter()
        for program in self._programs:
            assert program.stdin is not None
            program.stdin.write(f"{steps}\n")
            program.stdin.flush()
        took = [float(self._line(program)) for program in self._programs]
        if not self._apart:
            return time.perf_counter() - start
        parts = [speed / sum(self._apart) for speed in self._apart]
        return 1 / sum(part / seconds for part, seconds in zip(parts, took, strict=True))

    @staticmethod
    def _line(program: subprocess.Popen[str]) -> str:
        assert program.stdout is not None
        return program.stdout.readline().strip()

    def close(self) -> None:
        for program in self._programs:
            program.kill()
            program.wait()


def peers(role: str, model: str, speeds: Sequence[float], hosts: Sequence[Host] = ()) -> Programs:
    """The ranks of a peer, each at its host if there are several."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = hosts[0].address if hosts else "127.0.0.1"
    commands = []
    for rank in range(len(speeds)):
        words = [
            sys.executable, "-m", "bench.train.peers", role, model, str(rank), address, str(port),
            ",".join(map(str, speeds)),
        ]  # fmt: skip
        # Gloo would look for the machine's name, which is none of the hosts'.
        there = ("env", "GLOO_SOCKET_IFNAME=eth0")
        commands.append(hosts[rank].command(*there, *words) if hosts else words)
    return Programs(role, commands, speeds if role == CEILING else ())


@contextlib.contextmanager
def ours(
    model_name: str, groups: int, devices: int, batch: Any
) -> Iterator[Callable[[int], float]]:
    """A trainer on the current lease; a burst ends when all devices are done."""
    model, _ = made(model_name)
    with shoal.train.worker_groups(groups, devices) as formed:
        with shoal.train.Trainer(model, loss_of, adamw(model), formed) as trainer:

            def run(steps: int) -> float:
                start = time.perf_counter()
                for _ in range(steps):
                    trainer.step(batch)
                trainer.synchronize()
                return time.perf_counter() - start

            yield run


def realtime(pids: Sequence[int], on: bool) -> None:
    """Lets these processes go before everything else, for the length of a burst. This program goes
    before its workers: it only hands out work, and three would else wait for two cores."""
    policy = os.SCHED_FIFO if on else os.SCHED_OTHER
    for pid in pids:
        priority = (2 if pid == os.getpid() else 1) if on else 0
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.sched_setscheduler(int(thread), policy, os.sched_param(priority))


def stolen_s() -> float:
    """Processor time of all cores that the host of a virtual machine has given to others."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


def undisturbed(contestant: Contestant, steps: int) -> tuple[float, float]:
    """Seconds of a burst, and the part of the cores' time that was stolen in it: of several tries the
    first with hardly any, or the one with the least."""
    tries = []
    for _ in range(TRIES):
        before = stolen_s()
        seconds = contestant.run(steps)
        tries.append((seconds, (stolen_s() - before) / (seconds * (os.cpu_count() or 1))))
        if tries[-1][1] < STOLEN_MAX:
            break
    return min(tries, key=lambda tried: tried[1])


def race(
    contestants: Sequence[Contestant], rounds: int, burst_s: float, urgent: bool = False
) -> tuple[dict[str, list[float]], float]:
    """Seconds a step of everybody, round by round, and the largest part of a burst that was stolen."""
    counts = {}
    for contestant in contestants:
        contestant.run(10)  # shares are found, shapes are warm
        seconds = contestant.run(2) / 2
        counts[contestant.name] = max(1, round(burst_s / seconds))
    times: dict[str, list[float]] = {c.name: [] for c in contestants}
    most_stolen = 0.0
    for turn in range(rounds):
        for contestant in contestants if turn % 2 == 0 else reversed(contestants):
            steps = counts[contestant.name]
            if urgent:
                realtime(contestant.pids, True)
            try:
                seconds, stolen = undisturbed(contestant, steps)
                times[contestant.name].append(seconds / steps)
                most_stolen = max(most_stolen, stolen)
            finally:
                if urgent:
                    realtime(contestant.pids, False)
    return times, most_stolen


def compare(
    model: str, speeds: Sequence[float], rounds: int, burst_s: float, urgent: bool
) -> tuple[dict[str, list[float]], float]:
    """One model on two devices of these speeds."""
    _, batch = made(model)
    equal = min(speeds) == max(speeds)
    roles: dict[str, Sequence[float]] = {"DDP": speeds}
    if equal:
        roles |= {"FSDP2": speeds, "pipelining 1F1B": speeds}
    roles |= {
        "one process": [1.0],
        CEILING: speeds,
        IN_STEP: speeds,
    }  # beside those that are compared with them
    specs = [f"cpu,threads=1,memory=3GiB,speed={s}" for s in speeds]
    with contextlib.ExitStack() as stack:
        contestants = []
        for role, ranks in roles.items():
            try:
                ranked = peers(role, model, ranks)
            except RuntimeError as error:
                print(error)
                continue
            stack.callback(ranked.close)
            contestants.append(Contestant(role, ranked.run, ranked.pids))
        pool = stack.enter_context(shoal.up(specs))
        lease = stack.enter_context(shoal.connect(pool.url, devices=2))
        pids = [os.getpid(), *lease.worker_pids]
        layouts = {"data parallel": (2, 1), "two stages": (1, 2), "one shoal device": (1, 1)}
        for name, (groups, devices) in layouts.items():
            run = stack.enter_context(ours(model, groups, devices, batch))
            contestants.append(Contestant(name, run, pids))
        return race(contestants, rounds, burst_s, urgent)


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Medians over the rounds: time of a step, speed against one process and against the ceiling. And
    the latter of everybody's fastest quarter, for what else runs on the machine only ever adds time."""
    base = times["one process"]
    ceiling = times[CEILING]
    found = {}
    for name, seconds in times.items():
        ratios = [b / s for b, s in zip(base, seconds, strict=True)]
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        found[name] = {
            "ms": statistics.median(seconds) * 1e3,
            "speed": statistics.median(ratios),
            "speed_q1": quartiles[0],
            "speed_q3": quartiles[2],
        }
        parts = [c / s for c, s in zip(ceiling, seconds, strict=True)]
        found[name]["of_ceiling"] = statistics.median(parts)
        found[name]["of_ceiling_fastest"] = _fastest(ceiling) / _fastest(seconds)
    return found


def _fastest(seconds: Sequence[float]) -> float:
    return statistics.mean(sorted(seconds)[: max(1, len(seconds) // 4)])


def show(console: Console, title: str, found: dict[str, dict[str, float]]) -> None:
    table = Table(title=title, title_justify="left")
    for heading in ("", "ms a step", "x one process", "quartiles", "x ceiling", "fastest quarter"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, row in found.items():
        table.add_row(
            name,
            f"{row['ms']:.1f}",
            f"{row['speed']:.2f}",
            f"{row['speed_q1']:.2f} to {row['speed_q3']:.2f}",
            f"{row['of_ceiling']:.2f}",
            f"{row['of_ceiling_fastest']:.2f}",
        )
    console.print(table)
