"""Breaks parts of a pool at random while tasks are submitted and run, and checks what must hold.

No acknowledged submission is lost, no task runs twice at once, none waits without a reason, and the
head answers again within a limit. Each round kills one process of a random role, fills the disk of the
pool's state, or steps its clock. Between rounds submissions go on. Most of them are of tasks that no
device can hold, and which wait: `--runs` says how many a second run.

    python -m bench.chaos --rounds 200
    python -m bench.chaos --rounds 20 --rate 5 --runs 1 --seed 3 --roles head,runner

Exit code 0: everything held. 1: something did not; the lines above say what.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.clock import Stepped
from tests.support.disks import file_system
from tests.support.standing import StandingPool

from shoal.errors import ShoalError
from shoal.pool.base import paths
from shoal.pool.client.tasks import TaskClient, TaskError, inherited
from shoal.pool.wire.messages import AskStatus, PoolStatus
from shoal.pool.wire.task_messages import TaskInfo
from shoal.tasks.spec import Needs, TaskSpec

ROLES = ("head", "planner", "runner", "agent", "server", "worker", "disk", "clock")
STATE_BYTES = 256 * 2**20  # of the disk with the pool's state
CLOCK_STEPS_S = (-86400, -3600, -5, 0, 5, 3600, 86400)
MiB = 2**20
#: A program that holds a lock of its own while it runs: a second one at the same time says so.
PROGRAM = """
import fcntl, os, sys, time
here = os.path.join(sys.argv[1], os.environ["SHOAL_TASK"])
lock = open(here + ".lock", "a")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    open(here + ".twice", "a").close()
with open(here + ".runs", "a") as runs:
    runs.write(os.environ["SHOAL_ATTEMPT"] + "\\n")
if sys.argv[2] == "device":
    import torch
    x = torch.ones(16, device="shoal")
    end = time.monotonic() + float(sys.argv[3])
    while time.monotonic() < end:
        x = x * 1.0
        assert x.sum().item() == 16
else:
    time.sleep(float(sys.argv[3]))
"""


@dataclass(frozen=True)
class Options:
    rounds: int
    rate: float  # submissions a second
    runs: float  # of them, those that run
    seed: int
    roles: list[str]
    settle_s: float = 600.0
    back_s: float = 10.0


@dataclass
class Found:
    """What went wrong, and what was counted."""

    problems: list[str] = field(default_factory=list)
    acknowledged: set[str] = field(default_factory=set)
    states: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    back_s: list[float] = field(default_factory=list)  # from a kill to the head's next answer
    submitted: int = 0
    refused: int = 0  # while the disk was full


class Submitter(threading.Thread):
    """Submits programs at a rate, each again with its key until it is acknowledged."""

    def __init__(
        self, url: str, folder: Path, rate: float, runs: float, seed: int, found: Found
    ) -> None:
        super().__init__(name="submitter", daemon=True)
        self._runs = runs
        self.stopping = threading.Event()
        self._url, self._folder, self._rate = url, folder, rate
        self._random = random.Random(seed + 1)
        self._found = found

    def run(self) -> None:
        begin, number = time.monotonic(), 0
        with TaskClient(self._url, away_s=60) as client:
            while not self.stopping.wait(max(0.0, begin + number / self._rate - time.monotonic())):
                number += 1
                runs = self._random.random() < self._runs / self._rate
                one = self._spec() if runs else self._waiting()
                while not self.stopping.is_set():  # a refused one again: its key makes it one task
                    try:
                        made = client.submit(f"chaos-{number}", [one])
                        self._found.submitted += 1
                        self._found.acknowledged.add(made[0].id)
                        break
                    except TaskError as error:
                        if error.code != "disk":
                            self._found.problems.append(f"a submission failed: {error}")
                            break
                        self._found.refused += 1
                        self.stopping.wait(0.1)
                    except ShoalError as error:
                        self._found.problems.append(f"a submission failed: {error}")
                        break

    def _waiting(self) -> TaskSpec:
        """Return a task that no device of the pool can hold."""
        return TaskSpec(
            ["true"], str(self._folder), name="wait", needs=Needs(1, None, 2**50),
            machine=paths.host_id(),
        )  # fmt: skip

    def _spec(self) -> TaskSpec:
        on_device = self._random.random() < 0.1
        length_s = self._random.uniform(0.0, 1.0)
        words = [str(self._folder), "device" if on_device else "plain", f"{length_s:.2f}"]
        return TaskSpec(
            [sys.executable, "-S" if not on_device else "-u", "-c", PROGRAM, *words],
            str(self._folder), name="chaos", needs=Needs(1, None, 8 * MiB), retries=1000,
            inherited=inherited(), machine=paths.host_id(), grace_s=1.0,
        )  # fmt: skip


@dataclass
class World:
    """What is broken, and how."""

    pool: StandingPool
    state: Path  # the disk with the pool's state
    clock: Stepped
    chance: random.Random
    found: Found

    def break_one(self, role: str) -> None:
        if role == "disk":
            self._fill_disk()
        elif role == "clock":
            self.clock.set(self.chance.choice(CLOCK_STEPS_S))
            self.found.kills["clock"] += 1
        else:
            kill(self.pool, role, self.chance, self.found)

    def _fill_disk(self) -> None:
        filler = self.state / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(65536))
        time.sleep(self.chance.uniform(0.2, 1.0))
        filler.unlink()
        self.found.kills["disk"] += 1


def kill(pool: StandingPool, role: str, chance: random.Random, found: Found) -> None:
    """Kill one process of a role, and wait until the head answers again."""
    status = answer(pool, 30)
    if status is None:
        found.problems.append("the head did not answer for 30 s")
        return
    pids = [p.pid for p in status.processes if p.role == role]
    if not pids:
        return
    with suppress(ProcessLookupError):
        os.kill(chance.choice(pids), signal.SIGKILL)
    found.kills[role] += 1
    begin = time.monotonic()
    if answer(pool, 30) is None:
        found.problems.append(f"after the {role} was killed the head did not answer for 30 s")
    found.back_s.append(time.monotonic() - begin)


def answer(pool: StandingPool, seconds: float) -> PoolStatus | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(ShoalError, OSError):
            found = pool.ask(AskStatus())
            if isinstance(found, PoolStatus):
                return found
        time.sleep(0.05)
    return None


def check_waiting(client: TaskClient, found: Found) -> list[TaskInfo]:
    """Every task that waits has a reason."""
    unfinished = list(client.tasks())
    for one in unfinished:
        if one.state in ("waiting", "held", "suspended") and not one.reasons:
            found.problems.append(f"{one.id} is {one.state} without a reason")
    return unfinished


def until_done(client: TaskClient, seconds: float, found: Found) -> None:
    """Wait until every task has ended."""
    deadline = time.monotonic() + seconds
    while unfinished := check_waiting(client, found):
        if time.monotonic() > deadline:
            for one in unfinished[:10]:
                why = "; ".join(reason.text for reason in one.reasons)
                found.problems.append(f"{one.id} is still {one.state}: {why}")
            return
        time.sleep(0.5)


def check_ends(client: TaskClient, folder: Path, found: Found) -> None:
    """Every acknowledged task is known and succeeded, and none ran twice at once."""
    known = {one.id: one for one in client.tasks(ended=True)}
    for lost in sorted(found.acknowledged - known.keys()):
        found.problems.append(f"{lost} was acknowledged, and nobody knows it")
    for one in known.values():
        found.states[one.state] += 1
        if one.name == "wait":
            if one.state != "cancelled":
                found.problems.append(f"{one.id}, which nothing can hold, is {one.state}")
            continue
        if one.state not in ("succeeded", "failed") and one.id in found.acknowledged:
            found.problems.append(f"{one.id} ended as {one.state}: {one.end_reason}")
        elif one.state == "failed":
            found.problems.append(f"{one.id} failed: {one.end_reason}")
        runs = folder / f"{one.id}.runs"
        if one.state == "succeeded" and not runs.exists():
            found.problems.append(f"{one.id} succeeded without having run")
        if runs.exists():
            attempts = runs.read_text().split()
            if len(set(attempts)) < len(attempts):
                found.problems.append(f"{one.id} ran an attempt twice: {attempts}")
    for twice in folder.glob("*.twice"):
        found.problems.append(f"{twice.stem} ran twice at once")


def cancel_waiting(client: TaskClient) -> None:
    """Cancel the tasks that nothing can hold."""
    for one in list(client.tasks()):
        if one.name == "wait":
            client.change(one.id, "cancel")


@contextmanager
def world(root: Path, seed: int, found: Found, roles: list[str]) -> Iterator[World]:
    """A pool with two small devices, whose state has a disk and whose clock can be set."""
    (root / "pool").mkdir()
    clock = Stepped(root)
    state = root / "pool" / "state"
    if "disk" in roles:
        disk: AbstractContextManager[object] = file_system(state, f"size={STATE_BYTES}")
    else:
        disk = nullcontext()
    devices = [f"cpu,memory={64 * MiB},threads=1,name=d{i}" for i in range(2)]
    with disk, StandingPool(
        root / "pool", *devices, tasks=True, variables=clock.environment
    ) as pool:  # fmt: skip
        yield World(pool, state, clock, random.Random(seed), found)


def chaos(options: Options) -> Found:
    found = Found()
    with tempfile.TemporaryDirectory(prefix="shoal-chaos-") as root:
        folder = Path(root) / "work"
        folder.mkdir()
        with world(Path(root), options.seed, found, options.roles) as here:
            submitter = Submitter(
                here.pool.url, folder, options.rate, options.runs, options.seed, found
            )
            submitter.start()
            with TaskClient(here.pool.url, away_s=60) as client:
                for number in range(options.rounds):
                    time.sleep(here.chance.uniform(0.1, 1.5))
                    here.break_one(here.chance.choice(options.roles))
                    if (number + 1) % 10 == 0:
                        check_waiting(client, found)
                        print(f"round {number + 1}: {summary(found)}", flush=True)
                submitter.stopping.set()
                submitter.join(60)
                cancel_waiting(client)
                until_done(client, options.settle_s, found)
                check_ends(client, folder, found)
    late_s = max(found.back_s, default=0.0)
    if late_s > options.back_s:
        found.problems.append(f"the head was back after {late_s:.1f} s")
    return found


def summary(found: Found) -> str:
    kills = ", ".join(f"{role} {count}" for role, count in sorted(found.kills.items()))
    back = max(found.back_s, default=0.0)
    return (
        f"{found.submitted} submitted; broken: {kills or 'nothing'}; the head was back within "
        f"{back:.1f} s; {len(found.problems)} problem(s)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200, help="what is broken, one by one")
    parser.add_argument("--rate", type=float, default=50.0, help="submissions a second")
    parser.add_argument("--runs", type=float, default=1.0, help="of them, those that run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--roles", default=",".join(ROLES), help="what to kill or break")
    parser.add_argument("--settle", type=float, default=600.0, help="seconds for the rest to end")
    parser.add_argument("--back", type=float, default=10.0, help="seconds for the head to be back")
    given = parser.parse_args()
    options = Options(
        given.rounds, given.rate, given.runs, given.seed, given.roles.split(","), given.settle,
        given.back,
    )  # fmt: skip
    found = chaos(options)
    for problem in found.problems[:50]:
        print(problem)
    states = ", ".join(f"{state} {count}" for state, count in sorted(found.states.items()))
    print(f"{summary(found)}; ended: {states}")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
