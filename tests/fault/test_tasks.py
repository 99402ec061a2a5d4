"""Head, runner, agent and worker are killed while a task runs: it is not lost, and never runs twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.pool.base import paths
from shoal.pool.client.tasks import TaskClient, inherited
from shoal.pool.wire.task_messages import TaskInfo
from shoal.tasks.spec import Needs, TaskSpec
from tests.support import processes
from tests.support.standing import StandingPool, shoal_command
from tests.support.waiting import wait_until

MiB = 2**20
#: Notes its start, and waits until it is told to end.
WAITS = """
import os, sys, time
with open("runs", "a") as file:
    file.write(os.environ["SHOAL_ATTEMPT"] + " " + str(os.getpid()) + "\\n")
print("begun", flush=True)
while not os.path.exists("end"):
    time.sleep(0.02)
print("over", flush=True)
"""
ON_DEVICE = """
import os, torch
x = torch.ones(4, device="shoal")
with open("runs", "a") as file:
    file.write(os.environ["SHOAL_ATTEMPT"] + " " + str(os.getpid()) + "\\n")
while not os.path.exists("end"):
    assert x.sum().item() == 4
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[StandingPool]:
    with StandingPool(tmp_path, "cpu,memory=64MiB,threads=1", tasks=True) as made:
        yield made


@pytest.fixture
def client(pool: StandingPool) -> Iterator[TaskClient]:
    with TaskClient(pool.url, away_s=30) as made:
        yield made


def begin(client: TaskClient, folder: Path, source: str = WAITS, **changes: object) -> TaskInfo:
    spec = TaskSpec(
        [sys.executable, "-c", source], str(folder), name="t", needs=Needs(1, None, 16 * MiB),
        inherited=inherited(), machine=paths.host_id(), **changes,
    )  # fmt: skip
    return client.submit("key", [spec])[0]


def runs(folder: Path) -> list[tuple[int, int]]:
    """Attempt and process of every start."""
    path = folder / "runs"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(a), int(p)) for a, p in (line.split() for line in lines)]


def kill(pool: StandingPool, role: str) -> None:
    def found() -> list[int]:
        return [p.pid for p in pool.status().processes if p.role == role]

    wait_until(lambda: bool(found()), 30, f"the pool has a {role}")
    os.kill(found()[0], signal.SIGKILL)


def test_a_killed_head(pool: StandingPool, client: TaskClient, tmp_path: Path) -> None:
    """The task runs on, its log is followed across the kill, and its end is known."""
    task = begin(client, tmp_path)
    wait_until(lambda: len(runs(tmp_path)) == 1, 60, "it runs")
    follows = subprocess.Popen(
        shoal_command("logs", "-f", task.id), env=pool.environment(SHOAL_POOL=pool.url),
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert follows.stdout is not None
    assert follows.stdout.readline() == "begun\n"
    for _ in range(2):
        kill(pool, "head")
        wait_until(lambda: client.task(task.id).state == "running", 30, "it runs on")
    (tmp_path / "end").touch()
    assert client.wait(task.id, 60).state == "succeeded"
    assert follows.communicate(timeout=60)[0] == "over\n"
    assert len(runs(tmp_path)) == 1


def test_the_task_ends_while_the_head_is_away(
    pool: StandingPool, client: TaskClient, tmp_path: Path
) -> None:
    task = begin(client, tmp_path)
    wait_until(lambda: len(runs(tmp_path)) == 1, 60, "it runs")
    head = pool.head_pid
    os.kill(pool.process.pid, signal.SIGSTOP)  # so that nothing starts the head again
    os.kill(head, signal.SIGKILL)
    (tmp_path / "end").touch()
    pid = runs(tmp_path)[0][1]
    wait_until(lambda: not processes.alive(pid), 30, "the program has ended")
    os.kill(pool.process.pid, signal.SIGCONT)
    assert client.wait(task.id, 60).exit_code == 0
    assert len(runs(tmp_path)) == 1


def test_a_killed_runner(pool: StandingPool, client: TaskClient, tmp_path: Path) -> None:
    """Nothing survives it, and the task starts again, once the old program is gone."""
    task = begin(client, tmp_path)
    wait_until(lambda: len(runs(tmp_path)) == 1, 60, "it runs")
    kill(pool, "runner")
    wait_until(lambda: len(runs(tmp_path)) == 2, 60, "it runs again")
    (_, first), (attempt, _) = runs(tmp_path)
    assert not processes.alive(first)
    assert attempt == 2
    (tmp_path / "end").touch()
    assert client.wait(task.id, 60).state == "succeeded"


def test_a_killed_runner_and_no_retries(
    pool: StandingPool, client: TaskClient, tmp_path: Path
) -> None:
    task = begin(client, tmp_path, retries=0)
    wait_until(lambda: len(runs(tmp_path)) == 1, 60, "it runs")
    kill(pool, "runner")
    ended = client.wait(task.id, 60)
    assert (ended.state, ended.attempt) == ("lost", 1)
    assert "runner" in (ended.end_reason or "")


def test_a_killed_attempt_process(pool: StandingPool, client: TaskClient, tmp_path: Path) -> None:
    """The runner ends what it has left behind."""
    task = begin(client, tmp_path, source="import os\nif os.fork() == 0: os.setsid()\n" + WAITS)
    wait_until(lambda: len(runs(tmp_path)) == 2, 60, "both processes run")
    first = [pid for _, pid in runs(tmp_path)]
    parent = processes.parent(next(p for p in first if processes.parent(p) not in first))
    assert "shoal.pool.runner.attempt_process" in processes.command(parent)
    os.kill(parent, signal.SIGKILL)
    wait_until(lambda: len(runs(tmp_path)) == 4, 60, "it runs again")
    assert not any(map(processes.alive, first))
    (tmp_path / "end").touch()
    assert client.wait(task.id, 60).state == "succeeded"


@pytest.mark.parametrize("role", ["worker", "agent"])
def test_a_lost_device(
    pool: StandingPool, client: TaskClient, tmp_path: Path, role: str
) -> None:  # fmt: skip
    """The program fails because of it, and the task starts again."""
    task = begin(client, tmp_path, source=ON_DEVICE)
    wait_until(lambda: len(runs(tmp_path)) == 1, 100, "it runs")
    kill(pool, role)
    wait_until(lambda: len(runs(tmp_path)) == 2, 100, "it runs again")
    (tmp_path / "end").touch()
    ended = client.wait(task.id, 60)
    assert (ended.state, ended.attempt) == ("succeeded", 2)


def test_no_runner_is_a_reason(pool: StandingPool, client: TaskClient, tmp_path: Path) -> None:
    os.kill(pool.process.pid, signal.SIGSTOP)
    try:
        kill(pool, "runner")
        wait_until(
            lambda: not any(p.role == "runner" for p in pool.status().processes), 30, "it is gone"
        )
        task = begin(client, tmp_path)
        found = client.task(task.id)
        assert found.state == "waiting"
        assert "no-runner" in {reason.code for reason in found.reasons}
    finally:
        os.kill(pool.process.pid, signal.SIGCONT)
    (tmp_path / "end").touch()
    assert client.wait(task.id, 60).state == "succeeded"
