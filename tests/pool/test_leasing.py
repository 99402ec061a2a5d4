"""Starting a pool, leasing its devices, sharing it, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import shoal
from shoal.pool.local.local_pool import describe
from shoal.pool.wire import session_messages
from tests.support import processes, programs
from tests.support.waiting import wait_until

MiB = 2**20


def free(pool: shoal.Pool) -> dict[str, int]:
    return {d.name: d.free_bytes for d in pool.devices}


# --- pools --------------------------------


def test_a_pool_says_what_it_has(pool: shoal.Pool) -> None:
    left, right = pool.devices
    assert (left.name, left.device, left.memory_bytes) == ("left", "cpu", 256 * MiB)
    assert (right.name, right.speed, right.threads) == ("right", 0.5, 1)
    assert left.sessions == 0
    assert describe(pool.url) == pool.devices
    assert pool.running
    assert pool.url in repr(pool)


def test_a_notebook_shows_pools_and_leases(pool: shoal.Pool) -> None:
    shown = pool._repr_html_()
    assert all(device.name in shown for device in pool.devices)
    with shoal.connect(pool.url) as lease:
        held = lease._repr_html_()
        assert lease.granted[0].info.name in held
        assert f"lease {lease.number}: in use" in held
    assert f"lease {lease.number}: closed" in lease._repr_html_()


def test_a_closed_pool_leaves_no_process() -> None:
    with shoal.up(["cpu,memory=64MiB"]) as pool:
        lease = shoal.connect(pool.url)
        torch.ones(3, device="shoal").sum().item()
        pids = processes.pool_pids(pool.url)
        assert set(lease.worker_pids) < set(pids)
    assert not pool.running
    wait_until(lambda: not any(map(processes.alive, pids)), 8, "the pool's processes are gone")
    pool.close()  # again is harmless
    with pytest.raises(shoal.DeviceLostError):
        torch.ones(3, device="shoal").sum().item()
    lease.close()


def test_two_pools_at_once(pool: shoal.Pool) -> None:
    with shoal.up(["cpu,memory=64MiB,name=other"]) as other:
        with shoal.connect(other.url) as lease:
            assert torch.ones(2, device="shoal").sum().item() == 2
            assert [d.info.name for d in lease.granted] == ["other"]
        with shoal.connect(pool.url) as lease:
            assert torch.ones(2, device="shoal").sum().item() == 2
            assert [d.info.name for d in lease.granted] == ["left"]


@pytest.mark.parametrize("declared", [["cpu,memory=lots"], ["nonsense!"]])
def test_what_cannot_be_declared_starts_nothing(declared: list[str]) -> None:
    with pytest.raises(shoal.DeviceSpecError):
        shoal.up(declared)


def test_a_pool_needs_a_device() -> None:
    with pytest.raises(shoal.PoolStartError, match="at least one device"):
        shoal.up([])


# --- leases --------------------------------


def test_a_lease_ends_with_its_block(pool: shoal.Pool) -> None:
    before = free(pool)
    with shoal.connect(pool.url, memory="64MiB") as lease:
        assert lease.active
        assert lease.devices == [torch.device("shoal", 1)]
        assert torch.ones(2, device="shoal").sum().item() == 2
        assert free(pool)["left"] == before["left"] - 64 * MiB
        worker = lease.worker_pids[0]
        assert processes.alive(worker)
    assert not lease.active
    assert "ended" in repr(lease)
    wait_until(lambda: not processes.alive(worker), 8, "the worker is gone")
    wait_until(lambda: free(pool) == before, 30, "the memory is free again")
    lease.close()  # again is harmless


def test_tensors_of_an_ended_lease_say_so(pool: shoal.Pool) -> None:
    with shoal.connect(pool.url):
        old = torch.ones(3, device="shoal")
        view = old[1:]
    with shoal.connect(pool.url):
        new = torch.ones(3, device="shoal")
        for use in (old.cpu, view.sum, lambda: old + 1, lambda: old + new, lambda: new.copy_(old)):
            with pytest.raises(shoal.DeviceLostError, match="ended"):
                use()
        assert new.sum().item() == 3


def test_a_second_connect_replaces_the_lease(pool: shoal.Pool) -> None:
    first = shoal.connect(pool.url)
    second = shoal.connect(pool.url)
    assert not first.active
    assert second.active
    assert second.epoch > first.epoch
    assert torch.ones(2, device="shoal").sum().item() == 2


def test_many_leases_in_a_row_leak_nothing(pool: shoal.Pool) -> None:
    kept = []
    with shoal.connect(pool.url, memory=MiB):
        kept.append(torch.ones(1, device="shoal"))
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with shoal.connect(pool.url, memory=MiB):
            assert torch.ones(5, device="shoal").sum().item() == 5
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    wait_until(lambda: all(d.sessions == 0 for d in pool.devices), 30, "no session is left")


@pytest.mark.parametrize("url", ["http://example", "nonsense", "shoal+local:/x", "shoal:/nowhere"])
def test_urls_of_another_kind_are_refused(url: str) -> None:
    with pytest.raises(shoal.LeaseError, match="is not the URL of a pool"):
        shoal.connect(url)


def test_a_pool_that_was_not_joined_says_how_to_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_IDENTITY", str(tmp_path / "none.pem"))
    with pytest.raises(shoal.LeaseError, match="shoal join CODE@nowhere:7433"):
        shoal.connect("shoal://nowhere:7433")


def test_a_pool_that_is_not_there_is_named() -> None:
    with pytest.raises(shoal.LeaseError, match=r"shoal\+local://gone cannot be reached"):
        shoal.connect("shoal+local://gone")


def test_more_than_there_is_is_refused_with_what_there_is(pool: shoal.Pool) -> None:
    with pytest.raises(shoal.LeaseError, match="3 devices were asked for, the pool has 2"):
        shoal.connect(pool.url, devices=3)
    with pytest.raises(shoal.LeaseError, match="left: 256 MiB of 256 MiB free, and nobody uses it"):
        shoal.connect(pool.url, memory="1GiB")
    for nothing in (0, -1):
        with pytest.raises(shoal.LeaseError):
            shoal.connect(pool.url, memory=nothing)
    with pytest.raises(shoal.LeaseError):
        shoal.connect(pool.url, devices=-1)
    assert free(pool) == {"left": 256 * MiB, "right": 128 * MiB}


def test_versions_that_differ_are_refused_by_name(
    pool: shoal.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = session_messages.our_versions()
    other = session_messages.Versions("9.9.9", "1.0.0", ours.protocol + 1)
    monkeypatch.setattr(session_messages, "our_versions", lambda: other)
    with pytest.raises(shoal.LeaseError) as raised:
        shoal.connect(pool.url)
    for version in (ours.shoal, ours.torch, "9.9.9", "1.0.0"):
        assert version in str(raised.value)
    monkeypatch.undo()
    with shoal.connect(pool.url):
        assert torch.ones(2, device="shoal").sum().item() == 2


# --- several clients --------------------------------

CLIENT = """
    import sys, torch
    memory, seed = sys.argv[1:3]
    import shoal
    lease = shoal.connect(memory=memory)
    torch.manual_seed(int(seed))
    x = torch.randn(50, 50, device="shoal")
    for _ in range(30):
        x = torch.tanh(x @ x.t() / 50)
    torch.manual_seed(int(seed))
    y = torch.randn(50, 50)
    for _ in range(30):
        y = torch.tanh(y @ y.t() / 50)
    print(torch.allclose(x.cpu(), y, atol=1e-5), lease.granted[0].info.memory_bytes)
"""


def test_several_programs_share_a_pool(pool: shoal.Pool) -> None:
    clients = [programs.start(CLIENT, "32MiB", str(seed), SHOAL_POOL=pool.url) for seed in range(4)]
    for client in clients:
        out, err = client.communicate(timeout=100)
        assert client.returncode == 0, err
        assert out == f"True {32 * MiB}\n"
    wait_until(lambda: free(pool)["left"] == 256 * MiB, 30, "everything is free again")


def test_a_quota_holds_beside_another_client(pool: shoal.Pool) -> None:
    greedy = programs.start(
        """
        import shoal, torch
        shoal.connect(memory="200MiB")
        print("ready", flush=True)
        input()
        """,
        SHOAL_POOL=pool.url,
    )
    assert greedy.stdout is not None
    assert greedy.stdout.readline() == "ready\n"
    try:
        assert free(pool) == {"left": 56 * MiB, "right": 128 * MiB}
        with pytest.raises(shoal.LeaseError, match="left: 56 MiB of 256 MiB free; 1 session"):
            shoal.connect(pool.url, memory="200MiB")
        with shoal.connect(pool.url, memory="32MiB") as lease:
            assert lease.granted[0].info.name == "right"  # the one with fewer sessions
            torch.ones(4 * MiB, device="shoal").sum().item()
            with pytest.raises(torch.OutOfMemoryError, match="of 32 MiB are in use"):
                torch.ones(9 * MiB, device="shoal")
    finally:
        greedy.communicate("", timeout=60)
    wait_until(lambda: free(pool)["left"] == 256 * MiB, 30, "the greedy client's memory is free")


def test_the_whole_memory_goes_to_the_first_who_asks_for_no_amount(pool: shoal.Pool) -> None:
    with shoal.connect(pool.url, devices=2):
        outcome = programs.run("import torch; torch.ones(2, device='shoal')", SHOAL_POOL=pool.url)
    assert outcome.code == 1
    assert "LeaseError" in outcome.err
    assert "left: 0 B of 256 MiB free" in outcome.err


def test_an_unmodified_program_joins_the_pool_of_its_environment(pool: shoal.Pool) -> None:
    out = programs.succeed(
        """
        import torch
        print(torch.ones(3, device="shoal").sum().item(), torch.shoal.get_device_name())
        """,
        SHOAL_POOL=pool.url,
    )
    assert out == "3.0 left\n"
