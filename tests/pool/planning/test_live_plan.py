"""A standing pool with its planner: processes, decisions and records of a real pool."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.standing import StandingPool
from tests.support.waiting import wait_until

#: Trains a small model for so many steps.
TRAIN = """
import sys, torch
torch.manual_seed(3)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)
).to("shoal")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.rand(64, 64, device="shoal")
for step in range(int(sys.argv[1])):
    loss = model(data).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        loss.item()
print(loss.item())
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    device = "cpu,memory=256MiB,host=256MiB,threads=1,name=only"
    with StandingPool(tmp_path_factory.mktemp("live"), device, tasks=True) as made:
        yield made


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return str(path)


def asked(pool: StandingPool, *arguments: str) -> Any:
    done = pool.run(*arguments, SHOAL_POOL=pool.url)
    assert done.code == 0, done.out + done.err
    return json.loads(done.out)


def submit(pool: StandingPool, program: str, steps: int) -> str:
    command = [sys.executable, program, str(steps)]
    made = asked(pool, "submit", "--json", "--steps", str(steps), "--name", "fit", "--", *command)
    return str(made["id"])


def state(pool: StandingPool, task: str) -> str:
    return str(asked(pool, "queue", task, "--json")["state"])


def planner_pid(pool: StandingPool) -> int:
    return next((p.pid for p in pool.status().processes if p.role == "planner"), 0)


def test_a_short_task_need_not_wait_for_a_long_one(pool: StandingPool, program: str) -> None:
    """One device: the long task is suspended, or shares it, as soon as both are known."""
    long = submit(pool, program, 1_000_000)
    wait_until(lambda: state(pool, long) == "running", 120, "the long task runs")
    wait_until(
        lambda: any(s.profile and s.profile.task_type for s in pool.status().sessions), 120,
        "its type is known",
    )  # fmt: skip
    short = submit(pool, program, 50)
    wait_until(lambda: state(pool, short) == "succeeded", 180, "the short task has ended")
    wait_until(lambda: state(pool, long) == "running", 60, "the long task goes on")
    asked(pool, "cancel", long, "--json")


def test_a_killed_planner_comes_back_and_no_task_waits_for_it(
    pool: StandingPool, program: str
) -> None:
    wait_until(lambda: planner_pid(pool) != 0, 60, "the planner runs")
    killed = planner_pid(pool)
    os.kill(killed, signal.SIGKILL)
    task = submit(pool, program, 10)
    wait_until(lambda: state(pool, task) == "succeeded", 180, "the task has ended")
    wait_until(lambda: planner_pid(pool) not in (0, killed), 90, "the planner is back")


def test_the_pools_day_can_be_simulated(pool: StandingPool, program: str) -> None:
    for _ in range(2):
        task = submit(pool, program, 10)
        wait_until(lambda t=task: state(pool, t) == "succeeded", 180, "the task has ended")  # type: ignore[misc]
    [record] = pool.directory.rglob("rounds.jsonl")
    done = pool.run("simulate", "--record", str(record), "--json")
    assert done.code == 0, done.out + done.err
