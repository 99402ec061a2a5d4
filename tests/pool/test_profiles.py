"""How fast devices are: measured while nobody uses them, and never in a lease's way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shoal
from shoal.pool.client import head_connection
from shoal.pool.wire import messages
from tests.support import processes
from tests.support.standing import StandingPool
from tests.support.waiting import wait_until

DEVICES = (
    "cpu,memory=256MiB,threads=1,name=fast",
    "cpu,memory=64MiB,threads=1,speed=0.2,name=slow",
)


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPool]:
    with StandingPool(tmp_path_factory.mktemp("pool"), *DEVICES, profile=True) as pool:
        yield pool


def _devices(pool: StandingPool, *options: str) -> dict[str, Any]:
    outcome = pool.run("devices", "--json", "--pool", pool.name, *options)
    assert outcome.code == 0, outcome.err
    return {d["name"]: d for d in json.loads(outcome.out)}


def _profiles(pool: StandingPool) -> dict[int, float]:
    """When each device was measured."""
    answer = pool.ask(messages.AskProfiles())
    assert isinstance(answer, messages.Profiles)
    return {d.number: d.profile.measured_at for d in answer.devices}


def _links(pool: StandingPool) -> list[int]:
    answer = pool.ask(messages.AskProfiles())
    assert isinstance(answer, messages.Profiles)
    return [len(d.profile.links) for d in answer.devices]


def _probes(pool: StandingPool) -> list[int]:
    return [
        p
        for p in processes.children(pool.agent_pid)
        if "shoal.pool.node.measuring.probe" in processes.command(p) and processes.alive(p)
    ]


def _until_measured(pool: StandingPool) -> None:
    wait_until(lambda: _links(pool) == [2, 2] and not _probes(pool), 60, "all is measured")


def test_devices_are_measured_by_themselves_and_shown(standing: StandingPool) -> None:
    _until_measured(standing)
    found = _devices(standing)
    fast, slow = found["fast"]["profile"], found["slow"]["profile"]
    assert slow["speed"] == 0.2
    assert slow["flops_per_s"]["float32"] < fast["flops_per_s"]["float32"]
    assert {"float32", "bfloat16"} <= set(fast["flops_per_s"])
    assert set(fast["links"]) == {"host", "slow"}
    assert set(slow["links"]) == {"host", "fast"}
    assert min(fast["bytes_per_s"], fast["to_host_bytes_per_s"], *fast["links"].values()) > 0
    assert fast["memory_bytes"] == 256 * 2**20
    assert found["fast"]["free_bytes"] == 256 * 2**20  # a measurement is no lease
    assert "f32 GFLOP/s" in standing.run("devices", "--pool", standing.name).out
    whole = standing.run("devices", "--pool", standing.name, "--profile").out
    assert "from host" in whole
    assert "speed 0.2" in whole


def test_they_are_measured_again_on_demand(standing: StandingPool) -> None:
    _until_measured(standing)
    before = _profiles(standing)
    _devices(standing, "--refresh")
    assert all(after > before[number] for number, after in _profiles(standing).items())


def test_a_lease_comes_first_and_devices_in_use_are_left_alone(standing: StandingPool) -> None:
    _until_measured(standing)
    before = _profiles(standing)
    standing.ask(messages.Measure())
    wait_until(lambda: bool(_probes(standing)), 30, "a measurement has begun")
    with shoal.connect(standing.url) as lease:  # all of its memory: nothing is taken off
        assert lease.granted[0].info.memory_bytes == 256 * 2**20
        x = torch.ones(4, device="shoal")
        assert x.sum().item() == 4
        wait_until(lambda: not _probes(standing), 30, "the measurement has made way")
        outcome = standing.run("devices", "--pool", standing.name, "--refresh")
        assert outcome.code == 0, outcome.err
        assert "fast is in use; the pool measures it when it is idle" in outcome.err
        assert (x + 1).sum().item() == 8
        assert lease.end_reason is None
        del x
    wait_until(lambda: all(t > before[n] for n, t in _profiles(standing).items()), 60, "measured")


def test_a_pool_that_starts_again_remembers(standing: StandingPool) -> None:
    _until_measured(standing)
    before = _profiles(standing)
    standing.stop()
    standing.start()
    wait_until(lambda: _profiles(standing) == before, 30, "the head knows the old figures")
    assert not _probes(standing)


def test_only_the_owner_of_a_standing_pool_can_ask_for_it() -> None:
    with shoal.up(devices=["cpu,memory=64MiB,threads=1"]) as pool:
        with head_connection.Connection(pool.url) as connection:
            answer = connection.ask(messages.AskProfiles())
            assert isinstance(answer, messages.Profiles)
            assert answer.devices == []
        with (
            head_connection.Connection(pool.url) as connection,
            pytest.raises(shoal.LeaseError, match="shoal up"),
        ):
            connection.ask(messages.Measure())
