"""The queue under load: submissions, waiting tasks, and the next task on a free device.

    python -m bench.queue                      # a minute of 1,000 submissions a second
    python -m bench.queue --seconds 10 --rate 200 --waiting 2000 --turns 4
    python -m bench.queue --ray VENV/bin/python --slurm

--ray takes the Python of an environment with ray[default]. --slurm takes Debian's packages slurmctld,
slurm-client and munge: installed, or unpacked and in PATH and LD_LIBRARY_PATH.

One load generator has 200 open connections. Prints one line of figures for each part, and exits with
1 if one is beyond its limit: a lost submission; p50 above 5 ms or p99 above 50 ms; a head above 120 MiB
or 4 KiB a task with 10,000 waiting tasks; `queue` above 100 ms; the next task's first operator later
than 0.5 s beyond the program's own start by hand; a heartbeat more than 100 ms late.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tests.support.standing import StandingPool

from bench import queue_peers
from bench.waiting import Beats, memory_bytes
from shoal.pool.base import limits, paths
from shoal.pool.client.head_connection import Connection
from shoal.pool.client.tasks import TaskClient, inherited
from shoal.pool.wire import frames, messages, task_messages
from shoal.tasks.spec import Needs, TaskSpec

MiB = 2**20
DEVICE = "cpu,memory=64MiB,threads=1"
#: Says when it starts, when its first operator is done, and when it ends.
PROGRAM = """
import sys, time
begin = time.time()
import torch
assert torch.ones(4, device="shoal").sum().item() == 4
first = time.time()
open(sys.argv[1], "a").write(f"{begin} {first} {time.time()}\\n")
"""


@dataclass
class Limits:
    """What was beyond its limit."""

    broken: list[str] = field(default_factory=list)

    def check(self, name: str, value: float, most: float) -> None:
        if value > most:
            self.broken.append(f"{name} is {value:.3g}, above {most:g}")


def spec(number: int) -> TaskSpec:
    """Return a small task, like a real one: a program with arguments and a shell's environment."""
    return TaskSpec(
        [sys.executable, "train.py", "--seed", str(number)], "/tmp", name="load",
        needs=Needs(1, None, 60 * MiB), inherited=inherited(), machine=paths.host_id(),
    )  # fmt: skip


class Generator:
    """Sends submissions at a rate over many connections, without waiting for their answers.

    A submission's time counts from the moment at which it was due.
    """

    def __init__(self, url: str, connections: int) -> None:
        self._connections = [Connection(url) for _ in range(connections)]
        self._selector = selectors.DefaultSelector()
        self._due: dict[socket.socket, deque[float]] = {}
        self._inboxes: dict[socket.socket, frames.Inbox] = {}
        for one in self._connections:
            self._due[one.socket] = deque()
            self._inboxes[one.socket] = frames.Inbox(frame_bytes_max=limits.ANSWER_BYTES_MAX)
            self._selector.register(one.socket, selectors.EVENT_READ)
        self.took_s: list[float] = []
        self.acknowledged: set[str] = set()
        self.refused: list[str] = []

    def run(self, rate: float, seconds: float, key: str) -> None:
        begin, count = time.monotonic(), int(rate * seconds)
        for number in range(count):
            due = begin + number / rate
            while (left_s := due - time.monotonic()) > 0:
                self._receive(left_s)
            connection = self._connections[number % len(self._connections)].socket
            self._due[connection].append(due)
            one = task_messages.Submission(f"{key}-{number}", spec(number))
            frames.send(connection, task_messages.SubmitTasks([one]))
        deadline = time.monotonic() + 60
        while any(self._due.values()) and time.monotonic() < deadline:
            self._receive(0.1)

    def _receive(self, wait_s: float) -> None:
        for key, _ in self._selector.select(wait_s):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            inbox = self._inboxes[connection]
            inbox.read(connection)
            while (answer := inbox.next(messages.FROM_HEAD)) is not None:
                self.took_s.append(time.monotonic() - self._due[connection].popleft())
                if isinstance(answer, task_messages.TaskPage):
                    self.acknowledged.update(task.id for task in answer.tasks)
                else:
                    self.refused.append(str(answer)[:200])

    def close(self) -> None:
        for one in self._connections:
            one.close()


def hold_device(url: str) -> Connection:
    """Lease the whole device, so that every task waits."""
    holder = Connection(url)
    assert isinstance(holder.ask(messages.AskLease(1, 60 * MiB, [])), messages.Lease)
    return holder


def part(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def load(options: argparse.Namespace, folder: Path, found: Limits) -> dict[str, float]:
    """A minute of submissions."""
    with StandingPool(folder, DEVICE, options=("--rule", options.rule)) as pool:
        holder = hold_device(pool.url)
        beats = Beats(pool.url)
        generator = Generator(pool.url, options.connections)
        beats.start()
        cpu_s = -processor_s(pool.head_pid)
        begin = time.monotonic()
        generator.run(options.rate, options.seconds, "load")
        lasted_s = time.monotonic() - begin
        beats.ended.set()
        beats.join()
        cpu_s += processor_s(pool.head_pid)
        with TaskClient(pool.url) as client:
            known = {task.id for task in client.tasks()}
        lost = len(generator.acknowledged - known)
        generator.close()
        holder.close()
    sent = int(options.rate * options.seconds)
    figures = {
        "submissions": sent,
        "acknowledged": len(generator.acknowledged),
        "lost": lost,
        "per_s": round(len(generator.acknowledged) / lasted_s, 1),
        "p50_ms": round(1000 * part(generator.took_s, 0.5), 2),
        "p99_ms": round(1000 * part(generator.took_s, 0.99), 2),
        "head_cores": round(cpu_s / lasted_s, 2),
        "beat_late_ms": round(1000 * max(beats.late_s), 1),
    }
    found.broken += generator.refused[:3]
    found.check("lost", lost + sent - len(generator.acknowledged), 0)
    found.check("submission p50, ms", figures["p50_ms"], 5)
    found.check("submission p99, ms", figures["p99_ms"], 50)
    found.check("beat late, ms", figures["beat_late_ms"], 100)
    return figures


def waiting(options: argparse.Namespace, folder: Path, found: Limits) -> dict[str, float]:
    """Many tasks that wait: the head's memory, and how quickly it lists them."""
    with StandingPool(folder, DEVICE, options=("--rule", options.rule)) as pool:
        holder = hold_device(pool.url)
        pid = pool.head_pid
        beats = Beats(pool.url)
        beats.start()
        with TaskClient(pool.url, away_s=60) as client:
            client.submit("warm", [spec(n) for n in range(100)])
            before = memory_bytes(pid)
            for first in range(0, options.waiting, 1000):
                client.submit(f"wait-{first}", [spec(n) for n in range(first, first + 1000)])
            after = memory_bytes(pid)
            pages_s = []
            for _ in range(20):
                begin = time.monotonic()
                page = client.ask(task_messages.AskTasks(), task_messages.TaskPage)
                pages_s.append(time.monotonic() - begin)
                assert len(page.tasks) == limits.TASKS_PER_PAGE
            begin = time.monotonic()
            listed = sum(1 for _ in client.tasks())
            all_s = time.monotonic() - begin
        beats.ended.set()
        beats.join()
        holder.close()
    figures = {
        "waiting": options.waiting,
        "listed": listed,
        "head_MiB": round(after / MiB, 1),
        "KiB_a_task": round((after - before) / options.waiting / 1024, 2),
        "queue_ms": round(1000 * statistics.median(pages_s), 1),
        "queue_most_ms": round(1000 * max(pages_s), 1),
        "queue_all_s": round(all_s, 2),
        "beat_late_ms": round(1000 * max(beats.late_s), 1),
    }
    found.check("head, MiB", figures["head_MiB"], 120)
    found.check("KiB a task", figures["KiB_a_task"], 4)
    found.check("queue, ms", figures["queue_most_ms"], 100)
    found.check("tasks not listed", options.waiting + 100 - listed, 0)
    found.check("beat late, ms", figures["beat_late_ms"], 100)
    return figures


def turns(options: argparse.Namespace, folder: Path, found: Limits) -> dict[str, float]:
    """From a free device to the next task's first operator, beside the program's start by hand."""
    written = folder / "times"
    command = [sys.executable, "-c", PROGRAM, str(written)]
    by_hand = []
    with StandingPool(folder, DEVICE, tasks=True, options=("--rule", options.rule)) as pool:
        for _ in range(options.turns):
            begin = time.time()
            subprocess.run(command, env={**os.environ, "SHOAL_POOL": pool.url}, check=True)
            by_hand.append(float(written.read_text().split()[-2]) - begin)
        written.unlink()
        with TaskClient(pool.url) as client:
            one = TaskSpec(
                command, str(folder), name="turn", inherited=inherited(), machine=paths.host_id()
            )
            made = client.submit("turn", [one] * (options.turns + 1))
            for task in made:
                assert client.wait(task.id, 300).exit_code == 0
    lines = [[float(word) for word in line.split()] for line in written.read_text().splitlines()]
    lines.sort()
    gaps = [later[1] - earlier[2] for earlier, later in pairwise(lines)]
    figures = {
        "turns": len(gaps),
        "by_hand_s": round(statistics.median(by_hand), 3),
        "free_to_operator_s": round(statistics.median(gaps), 3),
        "beyond_s": round(statistics.median(gaps) - statistics.median(by_hand), 3),
    }
    found.check("beyond the start by hand, s", figures["beyond_s"], 0.5)
    return figures


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=1000.0, help="submissions a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--waiting", type=int, default=10_000, help="tasks that wait")
    parser.add_argument("--turns", type=int, default=10, help="tasks that take turns on a device")
    parser.add_argument("--rule", default="least-waiting")
    parser.add_argument("--parts", default="load,waiting,turns")
    parser.add_argument("--ray", metavar="PYTHON", help="a Python that has ray[default]")
    parser.add_argument("--slurm", action="store_true", help="Debian's slurmctld, slurmd, munge")
    options = parser.parse_args()
    found = Limits()
    for name in options.parts.split(","):
        with tempfile.TemporaryDirectory(prefix="shoal-queue-") as folder:
            figures = {"load": load, "waiting": waiting, "turns": turns}[name](
                options, Path(folder), found
            )
        print(json.dumps({name: figures}), flush=True)
    if options.ray:
        print(json.dumps({"ray": queue_peers.ray(options.ray)}), flush=True)
    if options.slurm:
        print(json.dumps({"slurm": queue_peers.slurm()}), flush=True)
    for problem in found.broken:
        print(problem)
    return 1 if found.broken else 0


if __name__ == "__main__":
    sys.exit(main())
