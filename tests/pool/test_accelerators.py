"""How accelerators start and fail, on the stand-in: a `cuda` whose memory the host cannot touch, and
whose driver refuses a child of a process that has started it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from tests.standin.environment import Options, Run
from tests.support import programs

MiB = 2**20
CONTEXT_BYTES = 32 * MiB  # of the stand-in
DEVICE_BYTES = 8 * 2**30


@pytest.fixture(scope="module")
def standin() -> Iterator[dict[str, str]]:
    """The variables of programs that have eight devices."""
    run = Run(Options("late", devices=8))
    found = run.environment()
    found["PYTHONPATH"] = os.pathsep.join([found["PYTHONPATH"], str(programs.ROOT)])
    yield found
    assert run.counts().races == 0
    run.close()


def test_a_device_starts_and_says_what_it_is(standin: dict[str, str]) -> None:
    source = """
        import json, torch, shoal
        with shoal.up(devices=["cuda"]) as pool, shoal.connect(pool.url) as lease:
            x = torch.arange(6.0, device="shoal").reshape(2, 3)
            found = torch.shoal.get_device_properties(0)
            print(json.dumps({
                "name": found.name, "device": found.device, "hardware": found.hardware,
                "memory": found.memory_bytes, "context": found.context_bytes,
                "capability": torch.shoal.get_device_capability(0),
                "sum": (x @ x.T).sum().item(),
            }))
    """
    found = json.loads(programs.succeed(source, **standin))
    assert found["hardware"].startswith("stand-in")
    assert (found["name"], found["device"]) == ("cuda:0", "cuda:0")
    assert found["context"] == CONTEXT_BYTES
    assert found["memory"] == DEVICE_BYTES - CONTEXT_BYTES
    assert found["capability"][0] > 0
    assert found["sum"] == 83.0


@pytest.mark.parametrize("devices", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_the_other_devices_of_a_machine_work(standin: dict[str, str], devices: int) -> None:
    """torch allocates on the current device, whatever device a tensor names."""
    source = """
        import sys, torch, shoal
        devices = int(sys.argv[1])
        specs = [f"cuda:{i},memory=128MiB" for i in range(devices)]
        with shoal.up(devices=specs) as pool, shoal.connect(pool.url, devices=devices) as lease:
            for i in (1, devices - 1):
                x = torch.full((64, 64), 2.0, device=f"shoal:{i + 1}")
                print(lease.granted[i].info.device, (x @ x).sum().item())
    """
    assert programs.succeed(source, str(devices), **standin).splitlines() == [
        "cuda:1 1048576.0",
        f"cuda:{devices - 1} 1048576.0",
    ]


def test_without_a_declaration_the_pool_has_all_accelerators(standin: dict[str, str]) -> None:
    source = """
        from shoal.pool.local import local_pool
        print(local_pool.default_devices())
    """
    found = programs.succeed(source, **standin)
    assert found.strip() == str([f"cuda:{i}" for i in range(8)])


def test_contexts_count_in_the_ledger(standin: dict[str, str]) -> None:
    source = """
        import torch, shoal
        from shoal.pool.client.head_connection import ask
        from shoal.pool.wire import messages
        with shoal.up(devices=["cuda:0,memory=256MiB"]) as pool, \\
             shoal.connect(pool.url, memory="64MiB"):
            connection, found = ask(pool.url, messages.Describe())
            print(found.devices[0].memory_bytes >> 20, found.devices[0].free_bytes >> 20)
    """
    assert programs.succeed(source, **standin).split() == ["224", "128"]


def test_memory_counts_are_those_of_the_device(standin: dict[str, str]) -> None:
    source = """
        import torch, shoal
        def counts():
            found = torch.shoal.memory_stats()
            return found["worker.used_bytes"] >> 20, found["worker.reserved_bytes"] >> 20
        with shoal.up(devices=["cuda:0,memory=256MiB"]) as pool, shoal.connect(pool.url):
            x = torch.ones(16 << 20, device="shoal")
            used, reserved = counts()
            print(64 <= used <= reserved)
            del x
            used, reserved = counts()
            print(used < 64 <= reserved)  # kept for later
            torch.shoal.empty_cache()
            print(counts()[1] < 64)
    """
    assert programs.succeed(source, **standin).split() == ["True", "True", "True"]
