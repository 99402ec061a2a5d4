"""Leases of several accelerators, and of accelerators with CPU devices, on the stand-in.

Peers cannot touch an accelerator's memory: it shows them copies.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.standin.environment import Options, Run
from tests.support import programs

_MODES = ["late", pytest.param("random", marks=pytest.mark.slow)]
_TWO = '["cuda:0,memory=128MiB", "cuda:1,memory=128MiB"]'
_MIXED = '["cuda:0,memory=128MiB", "cpu,memory=128MiB"]'


@pytest.fixture(scope="module", params=_MODES)
def standin(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """The variables of programs that have two devices."""
    run = Run(Options(request.param, devices=2))
    found = run.environment()
    found["PYTHONPATH"] = os.pathsep.join([found["PYTHONPATH"], str(programs.ROOT)])
    yield found
    assert run.counts().races == 0
    run.close()


def run_on(devices: str, source: str, standin: dict[str, str]) -> list[str]:
    """Run a program with a lease of all the devices. Return the lines that it printed."""
    start = f"""
        import torch, shoal
        from shoal.train.group import devices as group
        with shoal.up(devices={devices}) as pool, shoal.connect(pool.url, devices=2) as lease:
    """
    body = "\n".join(" " * 12 + line for line in source.strip("\n").splitlines())
    return programs.succeed(start.rstrip() + "\n" + body, **standin).splitlines()


@pytest.mark.parametrize("devices", [_TWO, _MIXED])
def test_values_go_to_every_device_and_back(standin: dict[str, str], devices: str) -> None:
    source = """
torch.manual_seed(1)
start = torch.randn(300, 300)
x = start.to("shoal:1")
for _ in range(3):
    x = (x @ x.T).to("shoal:2") / 300
    x = (x + 1).to("shoal:1")
local = start
for _ in range(3):
    local = (local @ local.T) / 300 + 1
torch.testing.assert_close(x.cpu(), local)
print("equal")
"""
    assert run_on(devices, source, standin) == ["equal"]


@pytest.mark.parametrize("devices", [_TWO, _MIXED])
def test_gradients_are_added_across(standin: dict[str, str], devices: str) -> None:
    """Ten million numbers: many chunks, and parts of one."""
    source = """
ours = torch.arange(5_000_001.0, device="shoal:1")
theirs = torch.full((5_000_001,), 0.5, device="shoal:2")
group.add_from(ours, theirs)
theirs.zero_()  # waits until it was read
torch.testing.assert_close(ours.cpu(), torch.arange(5_000_001.0) + 0.5)
group.add_from(theirs, ours)
torch.testing.assert_close(theirs.cpu(), ours.cpu())
print("added")
"""
    assert run_on(devices, source, standin) == ["added"]


def test_one_tensor_fills_both_devices_and_random_numbers_go_on(standin: dict[str, str]) -> None:
    source = """
torch.manual_seed(3)
table = torch.empty(40 << 20, device="shoal")  # 160 of 256 MiB
table.normal_()
first = torch.randn(8, device="shoal").cpu()
print(len({segment.home for segment in shoal.memory.map()}) > 1)
torch.manual_seed(3)
table.normal_()
print(torch.equal(first, torch.randn(8, device="shoal").cpu()))
print(abs(table.mean().item()) < 0.01)
"""
    assert run_on(_TWO, source, standin) == ["True", "True", "True"]


def test_random_numbers_do_not_change_to_another_kind_of_device(standin: dict[str, str]) -> None:
    source = """
table = torch.empty(40 << 20, device="shoal")  # 160 of 256 MiB
try:
    table.normal_()
    torch.shoal.synchronize()
except RuntimeError as error:
    print("of another kind" in str(error))
print(torch.ones(3, device="shoal:2").sum().item())
"""
    assert run_on(_MIXED, source, standin) == ["True", "3.0"]
