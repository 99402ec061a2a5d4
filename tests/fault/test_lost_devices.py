"""A part of the pool dies or freezes: an error within 5 s, never a hang, and a new lease works."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import shoal
from tests.support import processes, programs
from tests.support.standing import StandingPool
from tests.support.waiting import wait_until

LOST_WITHIN_S = 60.0  # 4 s on a quiet machine


DEVICES = ["cpu,memory=256MiB,threads=1", "cpu,memory=256MiB,threads=1"]


@pytest.fixture(scope="module")
def pool() -> Iterator[shoal.Pool]:
    """A pool whose workers die here, one after another."""
    with shoal.up(DEVICES) as made:
        yield made


@pytest.fixture
def mortal_pool() -> Iterator[shoal.Pool]:
    """A pool whose own parts die."""
    with shoal.up(DEVICES) as made:
        yield made


def works() -> bool:
    return torch.ones(100, device="shoal").sum().item() == 100


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "synchronize": lambda x: torch.shoal.synchronize(),
    "download": lambda x: x.cpu(),
    "upload": lambda x: [torch.ones(2**20).to("shoal").sum().item() for _ in range(9)],
    "unknown shape": lambda x: x.nonzero(),
    "full ring": lambda x: [x.add_(1) for _ in range(200_000)],
    "event": lambda x: torch.shoal.default_stream().record_event().synchronize(),
    "event query": lambda x: until(torch.shoal.default_stream().record_event().query),
    "stream query": lambda x: until(x.add_(1) is x and torch.shoal.default_stream().query),
    "random state": lambda x: torch.shoal.get_rng_state(),
}


def until(done: Callable[[], bool]) -> None:
    """As programs do that look in between: within the time in which they must be told of a loss."""
    deadline = time.monotonic() + LOST_WITHIN_S
    while not done() and time.monotonic() < deadline:
        time.sleep(0.001)


def check_lost(
    wait: Callable[[torch.Tensor], object], x: torch.Tensor, silent: bool = False
) -> None:
    """`silent`: its heartbeat must show the loss. All other losses show at once."""
    deadline = time.monotonic() + LOST_WITHIN_S

    def keep_waiting() -> None:  # the first may still be answered: a process takes time to die
        while time.monotonic() < deadline:
            wait(x)

    with pytest.raises(shoal.DeviceLostError) as raised:
        keep_waiting()
    assert ("no sign of life" in str(raised.value)) == silent
    assert "shoal.connect()" in str(raised.value)
    with pytest.raises(shoal.DeviceLostError):  # from now on at once
        x + 1


@pytest.mark.parametrize("name", WAITS)
def test_a_killed_worker(pool: shoal.Pool, name: str) -> None:
    with shoal.connect(pool.url) as lease:
        x = torch.ones(2**18, device="shoal")
        assert works()
        os.kill(lease.worker_pids[0], signal.SIGKILL)
        check_lost(WAITS[name], x)
        with shoal.connect(pool.url):
            assert works()


@pytest.mark.parametrize("name", ["item", "full ring"])
def test_a_frozen_worker(pool: shoal.Pool, name: str) -> None:
    with shoal.connect(pool.url) as lease:
        x = torch.ones(2**18, device="shoal")
        assert works()
        frozen = lease.worker_pids[0]
        os.kill(frozen, signal.SIGSTOP)
        check_lost(WAITS[name], x, silent=True)
        with shoal.connect(pool.url):
            assert works()
        wait_until(lambda: not processes.alive(frozen), 8, "the frozen worker is gone")


def test_every_waiting_thread_is_told(pool: shoal.Pool) -> None:
    told: list[BaseException] = []
    ready = threading.Barrier(5)

    def wait() -> None:
        x = torch.ones(100, device="shoal")
        ready.wait()
        try:
            while True:
                x.sum().item()
        except BaseException as error:
            told.append(error)

    with shoal.connect(pool.url) as lease:
        threads = [threading.Thread(target=wait, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        ready.wait()
        os.kill(lease.worker_pids[0], signal.SIGKILL)
        for thread in threads:
            thread.join(LOST_WITHIN_S)
        assert [type(error) for error in told] == [shoal.DeviceLostError] * 4


def test_a_long_call_is_not_a_lost_worker(pool: shoal.Pool) -> None:
    with shoal.connect(pool.url):
        x = torch.randn(900, 900, dtype=torch.float64, device="shoal")
        torch.linalg.svd(x)  # seconds of silence
        assert x.isfinite().all().item()


def test_a_full_ring_is_not_a_lost_worker(pool: shoal.Pool) -> None:
    with shoal.connect(pool.url):
        x = torch.randn(160, 160, device="shoal")
        for _ in range(25_000):  # more than fits: the client has to wait for the worker
            y = x @ x
        assert y.isfinite().all().item()


def test_a_killed_device_server(mortal_pool: shoal.Pool) -> None:
    pool = mortal_pool
    with shoal.connect(pool.url) as lease:
        x = torch.ones(100, device="shoal")
        server = processes.server_pids(pool.url)[0]
        assert lease.worker_pids[0] in processes.forked(server)
        os.kill(server, signal.SIGKILL)
        check_lost(WAITS["item"], x)
    wait_until(lambda: len(pool.devices) == 1, 30, "the head knows of the loss")
    with shoal.connect(pool.url) as lease:  # the other device is still there
        assert [d.info.name for d in lease.granted] == ["cpu/1"]
        assert works()


def test_the_last_device_server_gone_is_said(mortal_pool: shoal.Pool) -> None:
    pool = mortal_pool
    for server in processes.server_pids(pool.url):
        os.kill(server, signal.SIGKILL)
    wait_until(lambda: not pool.devices, 30, "the head knows of the loss")
    with pytest.raises(shoal.LeaseError, match="killed by SIGKILL"):
        shoal.connect(pool.url)


def test_a_killed_head(mortal_pool: shoal.Pool) -> None:
    pool = mortal_pool
    with shoal.connect(pool.url):
        x = torch.ones(100, device="shoal")
        pids = processes.pool_pids(pool.url)
        os.kill(pids[0], signal.SIGKILL)
        check_lost(WAITS["item"], x)
    wait_until(lambda: not any(map(processes.alive, pids)), 8, "the whole pool is gone")
    wait_until(lambda: not pool.running, 8, "the pool knows")
    with pytest.raises(shoal.LeaseError, match="cannot be reached"):
        shoal.connect(pool.url)
    with shoal.up(["cpu,memory=64MiB"]) as again, shoal.connect(again.url):
        assert works()


def test_an_embedded_pool_is_started_anew() -> None:
    out = programs.succeed(
        """
        import os, signal, torch, shoal
        from shoal.device import leases
        from tests.support import processes
        x = torch.ones(3, device="shoal")
        x.sum().item()
        os.kill(processes.head_pid(leases.current().url), signal.SIGKILL)
        try:
            while True:
                x.sum().item()
        except shoal.DeviceLostError as error:
            print("lost")
        shoal.connect()
        print(torch.ones(3, device="shoal").sum().item())
        """
    )
    assert out == "lost\n3.0\n"


def test_a_lost_device_of_two_leaves_the_other(pool: shoal.Pool) -> None:
    with shoal.connect(pool.url, devices=2) as lease:
        a, b = torch.ones(9, device="shoal:1"), torch.ones(9, device="shoal:2")
        os.kill(lease.worker_pids[1], signal.SIGKILL)
        with pytest.raises(shoal.DeviceLostError):
            b.sum().item()
        assert a.sum().item() == 9


def test_another_session_does_not_notice(pool: shoal.Pool) -> None:
    victim = programs.start(
        """
        import shoal, torch
        lease = shoal.connect(memory="64MiB")
        print(lease.worker_pids[0], flush=True)
        try:
            while True:
                torch.ones(10, device="shoal").sum().item()
        except shoal.DeviceLostError:
            print("lost")
        """,
        SHOAL_POOL=pool.url,
    )
    assert victim.stdout is not None
    worker = int(victim.stdout.readline())
    with shoal.connect(pool.url, memory="64MiB") as lease:
        x = torch.arange(1000.0, device="shoal")
        os.kill(worker, signal.SIGKILL)
        out, err = victim.communicate(timeout=30)
        assert out == "lost\n", err
        assert x.sum().item() == 499_500
        assert processes.alive(lease.worker_pids[0])


def test_a_lost_lease_can_be_dropped_in_any_order(pool: shoal.Pool) -> None:
    with shoal.connect(pool.url) as lease:
        kept = [torch.ones(1000, device="shoal") for _ in range(5)]
        os.kill(lease.worker_pids[0], signal.SIGKILL)
        with pytest.raises(shoal.DeviceLostError):
            kept[0].sum().item()
        with shoal.connect(pool.url):
            new = torch.ones(7, device="shoal")
            del kept  # frees addresses of the old session beside the new one
            assert new.sum().item() == 7


def test_a_late_answer_is_not_taken_for_that_of_the_next_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the network: a device that was given up in a read and is heard again is not read from."""
    device = "cpu,threads=1,memory=64MiB"
    with StandingPool(tmp_path, device, device, listen=True) as pool:
        monkeypatch.setenv("SHOAL_IDENTITY", str(pool.join("late").path))
        with shoal.connect(
            pool.network_url, devices=2, memory="32MiB", transport="network"
        ) as lease:
            first = torch.full((1000,), 1.0, device="shoal:2")
            second = torch.full((1000,), 2.0, device="shoal:2")
            torch.shoal.synchronize()
            os.kill(lease.worker_pids[1], signal.SIGSTOP)
            try:
                with pytest.raises(shoal.DeviceLostError):
                    first.to("shoal:1").sum().item()
            finally:
                os.kill(lease.worker_pids[1], signal.SIGCONT)
            with pytest.raises(shoal.DeviceLostError):  # and not 1000
                raise AssertionError(second.to("shoal:1").sum().item())
