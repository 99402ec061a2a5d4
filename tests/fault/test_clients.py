"""However a client ends: its workers are gone soon, and nothing of it stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

import shoal
from tests.support import processes, programs
from tests.support.waiting import wait_until

GONE_WITHIN_S = 8.0  # 2 s on a quiet machine; the head gives up a silent client after 10 s

PROGRAM = """
    import json, os, signal, sys, threading, time
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from shoal.device import leases

    end, with_loader = sys.argv[1], sys.argv[2] == "loader"
    x = torch.ones(2**20, device="shoal")
    x.sum().item()
    pinned = torch.ones(2**20, pin_memory=True)
    if with_loader:
        data = TensorDataset(torch.randn(64, 1000))
        loader = DataLoader(data, 4, num_workers=2, pin_memory=True, persistent_workers=True)
        batches = iter(loader)
        # One batch of each worker: torch's workers outlive a parent that dies before they look for it.
        for batch, _ in zip(batches, range(2)):
            (x[:1000] + batch[0].to("shoal", non_blocking=True)).sum().item()
    lease = leases.current()
    print(json.dumps({"url": lease.url, "workers": lease.worker_pids}), flush=True)
    input()
    for _ in range(1000):
        x = x * 1.0001  # work that is under way when the end comes
    if end == "exit":
        sys.exit(0)
    elif end == "exception":
        raise RuntimeError("the program's own")
    elif end == "quit":
        os._exit(3)
    elif end == "abort":
        os.abort()
    elif end == "thread":
        threading.Thread(target=lambda: [torch.ones(9, device="shoal") for _ in range(99)]).start()
        sys.exit(0)
    while True:
        x = x * 1.0001
        x[0].item()
"""

ENDS = {
    "exit": None,
    "exception": None,
    "quit": None,
    "abort": None,
    "thread": None,
    "ctrl-c": signal.SIGINT,
    "kill -15": signal.SIGTERM,
    "kill -9": signal.SIGKILL,
}


QUICK = ("exit", "ctrl-c", "kill -9")  # the others go the same ways: left to the slow run


def begin(end: str, loader: bool, **extra: str) -> tuple[subprocess.Popen[str], dict[str, object]]:
    program = programs.start(PROGRAM, end, "loader" if loader else "plain", **extra)
    assert program.stdout is not None
    line = program.stdout.readline()
    if not line:
        raise AssertionError(program.communicate()[1])
    return program, json.loads(line)


def finish(program: subprocess.Popen[str], end: str) -> None:
    assert program.stdin is not None
    program.stdin.write("go on\n")
    program.stdin.flush()
    sent = ENDS[end]
    if sent is not None:
        os.kill(program.pid, sent)
    program.wait(timeout=60)


def check_gone(program: subprocess.Popen[str], pids: list[int], mine: list[int]) -> str:
    """Returns what the program, and the pool that ended with it, had to say."""
    wait_until(
        lambda: not any(map(processes.alive, pids)), GONE_WITHIN_S, f"processes {pids} are gone"
    )
    # torch's own DataLoader workers look for their parent every 5 s.
    wait_until(lambda: not any(map(processes.alive, mine)), 30, f"processes {mine} are gone")
    said: str = program.communicate()[1]
    return said


@pytest.mark.parametrize(
    "end",
    [
        *QUICK,
        *[pytest.param(e, marks=pytest.mark.slow) for e in ENDS if e not in QUICK],
    ],
)
def test_an_embedded_pool_ends_with_its_program(end: str) -> None:
    shared_memory = processes.shared_memory_files()
    program, told = begin(end, loader=False)
    pids = processes.pool_pids(str(told["url"]))
    assert set(told["workers"]) < set(pids)  # type: ignore[call-overload]
    finish(program, end)
    said = check_gone(program, pids, [])
    assert "asyncio" not in said  # who ends with its program ends quietly
    assert processes.shared_memory_files() <= shared_memory


@pytest.mark.parametrize(
    "end", ["exception", pytest.param("ctrl-c", marks=pytest.mark.slow), "kill -9"]
)
def test_with_data_loader_workers_alive(end: str) -> None:
    shared_memory = processes.shared_memory_files()
    program, told = begin(end, loader=True)
    pids = processes.pool_pids(str(told["url"]))
    mine = [p for p in processes.descendants(program.pid) if p not in pids]
    assert len(mine) >= 2, "the loader's workers should be alive"
    finish(program, end)
    check_gone(program, pids, mine)
    wait_until(
        lambda: processes.shared_memory_files() <= shared_memory, 30, "/dev/shm is as it was"
    )


@pytest.mark.parametrize(
    ("end", "loader"),
    [
        ("exit", False),
        ("kill -9", True),
        pytest.param("kill -9", False, marks=pytest.mark.slow),
        pytest.param("exception", True, marks=pytest.mark.slow),
    ],
)
def test_a_shared_pool_outlives_its_clients(end: str, loader: bool) -> None:
    with shoal.up(["cpu,memory=512MiB,threads=1"]) as pool:
        assert len(pool.devices) == 1  # asking waits until the device is up
        before = processes.pool_pids(pool.url)
        program, told = begin(end, loader, SHOAL_POOL=pool.url)
        workers: list[int] = told["workers"]  # type: ignore[assignment]
        assert pool.devices[0].free_bytes == (512 - 128) * 2**20  # it names no memory: a floor
        mine = processes.descendants(program.pid)
        finish(program, end)
        check_gone(program, workers, mine)
        wait_until(lambda: pool.devices[0].sessions == 0, 30, "the session is over")
        assert pool.devices[0].free_bytes == 512 * 2**20
        wait_until(lambda: processes.pool_pids(pool.url) == before, 30, "only the pool is left")


def test_ctrl_c_raises_keyboard_interrupt_and_the_device_goes_on() -> None:
    program = programs.start(
        """
        import torch
        x = torch.randn(1000, 1000, device="shoal")
        x.sum().item()
        try:
            print("ready", flush=True)
            while True:
                for _ in range(10):
                    x = (x @ x).tanh()
                x.sum().item()
        except KeyboardInterrupt:
            print("interrupted", x.isfinite().all().item(), flush=True)
        """
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does: everyone of the group gets it
    out, err = program.communicate(timeout=60)
    assert out == "interrupted True\n", err
    assert program.returncode == 0
