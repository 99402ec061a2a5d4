"""The rule `priority` on a real pool: programs are suspended, go on and yield."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pool.planning.test_live_plan import TRAIN
from tests.support.standing import StandingPool
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

#: Works until it is asked to yield; the second time it ends.
YIELDS = """
import os, sys, time
import shoal, torch
shoal.task.should_yield()
lease = shoal.connect()
torch.ones(4, device=lease.devices[0]).sum().item()
if os.environ["SHOAL_ATTEMPT"] == "2":
    sys.exit(0)
while not shoal.task.should_yield():
    time.sleep(0.02)
sys.exit(75)
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    devices = [f"cpu,memory=256MiB,host=256MiB,threads=1,name={name}" for name in ("one", "two")]
    folder = tmp_path_factory.mktemp("priority")
    with StandingPool(folder, *devices, options=("--rule", "priority"), tasks=True) as made:
        yield made


def asked(pool: StandingPool, *arguments: str) -> Any:
    done = pool.run(*arguments, SHOAL_POOL=pool.url)
    assert done.code == 0, done.out + done.err
    return json.loads(done.out)


def submit(pool: StandingPool, source: Path, *arguments: str, **options: str) -> str:
    given = [word for name, value in options.items() for word in (f"--{name}", value) if word]
    command = [sys.executable, str(source), *arguments]
    return str(asked(pool, "submit", "--json", *given, "--", *command)["id"])


def until(pool: StandingPool, task: str, state: str) -> None:
    wait_until(
        lambda: asked(pool, "queue", task, "--json")["state"] == state, 100, f"{task} {state}"
    )


def test_a_suspended_training_ends_as_if_it_had_not_been(
    pool: StandingPool, tmp_path: Path
) -> None:
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    expected = subprocess.run(
        [sys.executable, program, "3000"], env=pool.environment(SHOAL_POOL=pool.url),
        capture_output=True, text=True, timeout=300, check=True,
    ).stdout  # fmt: skip
    low = [submit(pool, program, "3000", priority="low", name="low") for _ in range(2)]
    for task in low:
        until(pool, task, "running")
    urgent = submit(pool, program, "50", priority="high", name="urgent")
    wait_until(
        lambda: any(asked(pool, "queue", t, "--json")["state"] == "suspended" for t in low),
        100, "one is suspended",
    )  # fmt: skip
    for task in (urgent, *low):
        assert pool.run("wait", task, "--timeout", "300", SHOAL_POOL=pool.url).code == 0
    for task in low:
        assert pool.run("logs", task, SHOAL_POOL=pool.url).out == expected
        assert asked(pool, "queue", task, "--json")["attempt"] == 1


def test_a_program_with_two_devices_yields(pool: StandingPool, tmp_path: Path) -> None:
    program, short = tmp_path / "yields.py", tmp_path / "short.py"
    program.write_text(YIELDS)
    short.write_text("import torch; torch.ones(4, device='shoal').sum().item()")
    low = submit(pool, program, devices="2", priority="low", yields="")
    until(pool, low, "running")
    urgent = submit(pool, short, priority="high")
    for task in (urgent, low):
        assert pool.run("wait", task, "--timeout", "300", SHOAL_POOL=pool.url).code == 0
    ended = asked(pool, "queue", low, "--json")
    assert (ended["attempt"], ended["exit_code"], ended["state"]) == (2, 0, "succeeded")
