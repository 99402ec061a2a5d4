"""What a pool knows of programs that do nothing for it: counts, steps and peak memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import shoal
from shoal.pool.client.head_connection import ask
from shoal.pool.wire import messages
from shoal.pool.wire.profile_messages import SessionProfile
from tests.support.waiting import wait_until

MiB = 2**20
STEPS = 12


@pytest.fixture
def lease(pool: shoal.Pool) -> Iterator[shoal.Lease]:
    with shoal.connect(pool.url) as lease:
        yield lease


def profile_of(pool: shoal.Pool, lease: shoal.Lease) -> SessionProfile:
    granted = lease.granted[0]
    connection, answer = ask(
        pool.url, messages.AskSessionProfile((granted.info.number, granted.session))
    )
    connection.close()
    assert isinstance(answer, SessionProfile)
    return answer


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1, stride=2)
        self.linear = torch.nn.Linear(8 * 8 * 8, 32)
        self.attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.conv(x)).flatten(1)
        y = self.linear(y)[None]
        return self.attention(y, y, y, need_weights=False)[0].sum()


def train(device: str, steps: int) -> None:
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.rand(16, 3, 16, 16).to(device)
    for step in range(steps):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        if step % 5 == 0:
            x.mean().item()  # as programs log now and then
    x.sum().item()


def test_steps_and_type_of_an_unmodified_training(pool: shoal.Pool, lease: shoal.Lease) -> None:
    train("shoal", STEPS)
    wait_until(lambda: profile_of(pool, lease).steps == STEPS, 10, "the head knows the steps")
    profile = profile_of(pool, lease)
    assert profile.state == "running"
    assert profile.task_type
    assert profile.busy_ns > 0
    operators = {one.name.partition(".")[0]: one for one in profile.operators}
    assert operators["aten::convolution_backward"].calls == STEPS
    lease.close()
    with shoal.connect(pool.url) as again:
        train("shoal", STEPS + 5)
        wait_until(lambda: profile_of(pool, again).steps == STEPS + 5, 10, "the steps")
        assert profile_of(pool, again).task_type == profile.task_type


def test_flops_are_torchs_own_count(pool: shoal.Pool, lease: shoal.Lease) -> None:
    counter = FlopCounterMode(display=False)
    with counter:
        train("cpu", 1)
    train("shoal", STEPS)
    wait_until(lambda: profile_of(pool, lease).steps == STEPS, 10, "the head knows the steps")
    flops = sum(one.flops for one in profile_of(pool, lease).operators)
    # torch does not count its fused attention on CPUs: two products, and five backward, of four
    # heads, 16 queries, 16 keys and size 8.
    attention = 7 * 2 * 4 * 16 * 16 * 8
    assert flops == STEPS * (counter.get_total_flops() + attention)


def test_peak_memory_is_that_of_results_and_temporaries(
    pool: shoal.Pool, lease: shoal.Lease
) -> None:
    held = torch.ones(16 * MiB // 4, device="shoal")
    for _ in range(3):
        held + held  # a temporary at a time
    held.sum().item()
    wait_until(lambda: profile_of(pool, lease).peak_bytes >= 32 * MiB, 10, "the peak is known")
    assert profile_of(pool, lease).peak_bytes < 40 * MiB


def test_status_shows_profiles(pool: shoal.Pool, lease: shoal.Lease) -> None:
    torch.ones(4, device="shoal").sum().item()

    def shown() -> bool:
        connection, status = ask(pool.url, messages.AskStatus())
        connection.close()
        assert isinstance(status, messages.PoolStatus)
        return any(s.profile is not None and s.profile.calls > 0 for s in status.sessions)

    wait_until(shown, 10, "the status has a profile")


def test_swap_space_is_counted_by_place() -> None:
    """What does not fit the device is in host memory, and what does not fit there is on disk."""
    with (
        shoal.up(["cpu,memory=64MiB,host=32MiB,disk=128MiB,threads=1"]) as pool,
        shoal.connect(pool.url) as lease,
    ):
        held = [torch.ones(2 * MiB, dtype=torch.float64, device="shoal") for _ in range(8)]
        torch.shoal.synchronize()

        def counted() -> bool:
            found = profile_of(pool, lease)
            return 0 < found.host_bytes <= 32 * MiB and found.disk_bytes >= 32 * MiB

        wait_until(counted, 20, "128 MiB are on the device, in host memory and on disk")
        found = profile_of(pool, lease)
        assert found.used_bytes <= 64 * MiB
        assert found.used_bytes + found.host_bytes + found.disk_bytes >= 128 * MiB
        del held
        torch.shoal.synchronize()
        wait_until(lambda: profile_of(pool, lease).disk_bytes == 0, 20, "the disk is free again")
